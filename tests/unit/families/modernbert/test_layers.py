"""ModernBERT's layers: sequences of a row, initial values (the contract compares windows with transformers)."""

from __future__ import annotations

import math
import re

import pytest
import torch

from ctxlm_ds.data.sample import Batch
from ctxlm_ds.families.modernbert.config import ModernBertSection
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerSequence, ModelBuild
from ctxlm_ds.models.program import build_program, plain_program
from tests.encoder_batches import batch_of, random_rows, tiny_model
from tests.parity.mapping import hf_model, key_map_of, randomize

OUTPUTS, TERMS = ("predicted_logits",), ("masked_lm",)
SEQ_LENGTH, WINDOW, SLOTS = 40, 8, 12


def tiny(**changes: object) -> ModernBertSection:
    return tiny_model(
        family="modernbert", num_layers=5, intermediate_size=48, max_position_embeddings=SEQ_LENGTH,
        local_attention=WINDOW, **changes,
    )  # type: ignore[return-value]  # fmt: skip


def build_of(attention: str = "auto", packing: bool = False) -> ModelBuild:
    kernels = KernelSet({"attention": attention}, "cpu", torch.float32)
    return ModelBuild(OUTPUTS, kernels, shares_rows=packing)


def model_of(attention: str = "auto", packing: bool = False) -> LayerSequence:
    model = build_program(tiny(), build_of(attention, packing)).module(0)
    randomize(model)
    return model


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_a_packed_row_gives_what_its_sequences_give_alone(attention: str) -> None:
    lengths = [[17, 12, 8], [30], [5, 35]]
    rows = random_rows(lengths, 61, seed=3)
    alone = [[example] for row in rows for example in row]

    def outputs_and_gradients(batch: Batch, packing: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model = model_of(attention, packing)
        logits = model.run(batch.fields)["predicted_logits"]
        inside = batch.fields["masked_lm_labels"] >= 0
        loss = torch.nn.functional.cross_entropy(logits[inside], batch.fields["masked_lm_labels"][inside])
        return logits[inside].detach(), list(torch.autograd.grad(loss, tuple(model.parameters())))

    packed, packed_gradients = outputs_and_gradients(batch_of(rows, SEQ_LENGTH, TERMS, SLOTS), True)
    single, single_gradients = outputs_and_gradients(batch_of(alone, SEQ_LENGTH, TERMS, SLOTS), False)
    torch.testing.assert_close(packed, single, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(packed_gradients, single_gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_initial_values_are_those_of_transformers() -> None:
    """Deviations of every tensor, beyond two of which there is no value."""
    config = tiny_model(
        family="modernbert", num_layers=8, hidden_size=128, intermediate_size=192, vocab_size=997,
        initializer_range=0.02,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = dict(hf_model(config, OUTPUTS).named_parameters())
    whole = plain_program(config, OUTPUTS)
    small = 0.02 / math.sqrt(16)
    for row in key_map_of(config, OUTPUTS).rows:
        ours = whole.initial_value(row.ours, seed=0)
        wanted = row.to_ours(lambda name: theirs[name].detach())
        assert ours.shape == wanted.shape
        if ours.dim() == 1:
            assert torch.equal(ours, wanted), row.ours
            continue
        is_small = row.ours.endswith(("output.weight", "down.weight", "mlm_transform.weight"))
        limit = 2 * (small if is_small else 0.02)
        for value in (ours, wanted):
            assert value.abs().max() <= limit and value.abs().max() > 0.95 * limit, row.ours
        assert ours.std().item() == pytest.approx(wanted.std().item(), rel=0.03), row.ours


@pytest.mark.parametrize(
    ("settings", "path", "words"),
    [
        ({"local_attention": 7}, "model.local_attention", "7 is odd, .*set it to 8"),
        ({"hidden_size": 36, "num_attention_heads": 4}, "model.num_attention_heads", "heads of 9 elements"),
    ],
)
def test_impossible_shapes_are_named(settings: dict[str, int], path: str, words: str) -> None:
    config = ModernBertSection(**settings)  # type: ignore[arg-type]
    (problem,) = config.problems()
    assert problem.path == path
    assert re.search(words, problem.text)
