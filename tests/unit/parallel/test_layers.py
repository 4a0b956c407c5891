"""Layers of one process: products, padded vocabularies, facts (tests/dist/test_megatron.py has several ranks)."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.cross_entropy import vocabulary_sums
from ctxlm_ds.parallel.layers import (
    ReplicatedLinear,
    VocabParallelEmbedding,
    VocabularyBias,
    column_parallel_linear,
    row_parallel_linear,
)
from ctxlm_ds.parallel.parameters import ZEROS, Normal, collect_facts
from ctxlm_ds.parallel.placement import COLUMNS, VOCABULARY, Split

KERNELS = KernelSet({}, "cpu", torch.float32)
ALONE, INIT = ParallelContext(), Normal(0.02)


def filled(layer: nn.Module) -> nn.Module:
    """Layers leave their values unset."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


@pytest.mark.parametrize("activation", [None, "gelu", "relu"])
def test_products_are_those_of_torch(activation: str | None) -> None:
    x = torch.randn(2, 3, 4)
    column = filled(column_parallel_linear(4, 6, INIT, KERNELS, ALONE, activation))
    heads = filled(ReplicatedLinear(4, 6, INIT, KERNELS, activation))
    for layer in (column, heads):
        product = F.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(layer(x), getattr(F, activation)(product) if activation else product)
    for layer in (filled(row_parallel_linear(4, 6, INIT, KERNELS, ALONE)),
                  filled(ReplicatedLinear(4, 6, INIT, KERNELS, parallel=ALONE))):  # fmt: skip
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


def test_what_each_layer_declares() -> None:
    rows = Split("rows", (2, 4))
    made = nn.ModuleDict(
        {
            "column": column_parallel_linear(4, 6, INIT, KERNELS, ALONE, blocks=(2, 4)),
            "row": row_parallel_linear(4, 6, INIT, KERNELS, ALONE),
            "head": ReplicatedLinear(4, 6, INIT, KERNELS, optional=True),
            "table": VocabParallelEmbedding(7, 4, INIT, KERNELS, ALONE),
            "words": VocabularyBias(7, ALONE, optional=True),
        }
    )
    facts = collect_facts(made)
    assert {name: fact.split for name, fact in facts.items()} == {
        "column.weight": rows, "column.bias": rows, "row.weight": COLUMNS, "row.bias": None, "head.weight": None,
        "head.bias": None, "table.weight": VOCABULARY, "words.bias": VOCABULARY,
    }  # fmt: skip
    assert [name for name, fact in facts.items() if fact.decays] == [name for name in facts if name.endswith("weight")]
    assert [name for name, fact in facts.items() if fact.optional] == ["head.weight", "head.bias", "words.bias"]
    assert {name for name, fact in facts.items() if fact.grows == "vocabulary"} == {"table.weight", "words.bias"}
    assert all(fact.init == (ZEROS if name.endswith("bias") else INIT) for name, fact in facts.items())


@pytest.mark.parametrize(("multiple", "rows"), [(1, 7), (8, 8), (5, 10)])
def test_rows_that_pad_the_vocabulary_are_zero_and_never_predicted(multiple: int, rows: int) -> None:
    table = VocabParallelEmbedding(7, 4, INIT, KERNELS, ParallelContext(vocab_multiple=multiple))
    assert tuple(table.weight.shape) == (rows, 4) and not table.weight[7:].any()
    with torch.no_grad():
        table.weight[:7].normal_()
    ids, hidden = torch.tensor([[0, 6], [3, 3]]), torch.randn(2, 3, 4)
    torch.testing.assert_close(table.look_up(ids), F.embedding(ids, table.weight))
    scores = table.decode(hidden)
    torch.testing.assert_close(scores[..., :7], hidden @ table.weight[:7].T)
    assert scores.shape[-1] == rows and (scores[..., 7:] == float("-inf")).all()
    bias = VocabularyBias(7, ParallelContext(vocab_multiple=multiple))
    nn.init.ones_(bias.bias)
    torch.testing.assert_close(bias(scores)[..., :7], scores[..., :7] + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_pad_the_vocabulary_change_no_loss_and_get_no_gradient(dtype: torch.dtype) -> None:
    hidden, labels, found = torch.randn(6, 4).to(dtype), torch.tensor([0, 6, 3, IGNORE_LABEL, 3, 1]), []
    for multiple in (1, 16):
        parallel = ParallelContext(vocab_multiple=multiple)
        table, bias = VocabParallelEmbedding(7, 4, INIT, KERNELS, parallel), VocabularyBias(7, parallel)
        with torch.no_grad():
            table.weight[:7] = torch.arange(28).view(7, 4).sin()
            bias.bias[:7] = torch.arange(7).cos()
        table, bias = table.to(dtype), bias.to(dtype)
        x = hidden.clone().requires_grad_()
        sums = vocabulary_sums([bias(table.decode(x))], [labels], parallel)
        sums.loss.backward()
        assert not table.weight.grad[7:].any() and not bias.bias.grad[7:].any()
        found.append((sums, x.grad, table.weight.grad[:7], bias.bias.grad[:7]))
    torch.testing.assert_close(found[0], found[1])
