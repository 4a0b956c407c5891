"""GPT-2 and GPT as lists of layers: what a position sees, what travels between layers, what recomputing changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ctxlm_ds.data.sample import Batch
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerSequence
from ctxlm_ds.models.program import build_program
from ctxlm_ds.models.spec import ModelBuild
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.training.engine.losses import TermLosses
from tests.encoder_batches import tiny_model
from tests.ragged import Rows, collate, text_examples
from tests.sections import objective_section

OBJECTIVE = build_objective(objective_section(name="causal_lm"))
SEQ_LENGTH = 12
CONFIGS = {
    "gpt2": tiny_model(family="gpt2", hidden_activation="gelu_tanh"),
    "gpt1": tiny_model(family="gpt1", hidden_activation="gelu_tanh"),
}


@pytest.fixture(params=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> TransformerSection:
    return CONFIGS[request.param]


CAUSAL = CONFIGS | {
    "llama": tiny_model(family="llama", num_key_value_heads=2),
    "one head of keys": tiny_model(family="llama", num_key_value_heads=1, tie_word_embeddings=True),
}


def build(recompute: bool = False, attention: str = "auto") -> ModelBuild:
    kernels = KernelSet({"attention": attention}, "cpu", torch.float32)
    return ModelBuild(OBJECTIVE.outputs, kernels, recompute=recompute, shares_rows=True)


def batch(lengths: list[list[int]], seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    rows = [text_examples([rng.integers(2, 61, n + 1) for n in row]) for row in lengths]
    return collate(rows, OBJECTIVE, Rows(SEQ_LENGTH, max(map(len, lengths))))


def logits(model: LayerSequence, given: Batch) -> Tensor:
    with torch.no_grad():
        return model.run(given.fields)["logits"]


def test_a_position_sees_earlier_ones_of_its_document_and_no_other(config: TransformerSection) -> None:
    model = build_program(config, build()).module(1).eval()
    given = batch([[5, 7]])
    before = logits(model, given)
    assert before.shape == (1, SEQ_LENGTH, 61)
    for changed in range(SEQ_LENGTH):
        other = batch([[5, 7]])
        other.fields["input_ids"][0, changed] = 60 if given.fields["input_ids"][0, changed] != 60 else 59
        differs = (logits(model, other) != before).any(dim=-1)[0].tolist()
        end = 5 if changed < 5 else SEQ_LENGTH
        assert differs == [changed <= position < end for position in range(SEQ_LENGTH)]


@pytest.mark.parametrize("attention", ["sdpa", "bmm", "reference"])
@pytest.mark.parametrize("family", CAUSAL)
def test_documents_of_a_row_have_the_results_of_rows_of_their_own(family: str, attention: str) -> None:
    model = build_program(CAUSAL[family], build(attention=attention)).module(1)
    lengths = [4, 5, 3]
    rng = np.random.default_rng(0)
    documents = [rng.integers(2, 61, length + 1) for length in lengths]
    together = collate([text_examples(documents)], OBJECTIVE, Rows(SEQ_LENGTH, 3))
    alone = collate([text_examples([document]) for document in documents], OBJECTIVE, Rows(SEQ_LENGTH, 3))
    losses = TermLosses(OBJECTIVE.terms, OBJECTIVE.outputs, ParallelContext())
    found = []
    for given in (together, alone):
        outputs = model.run(given.fields)
        loss, _ = losses(outputs, given.fields, torch.ones(1))
        inside = outputs["logits"][given.fields["sequence_ids"] > 0]
        found.append([inside, loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert found[0][0].shape == (sum(lengths), 61)
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "bmm", "reference"])
def test_a_head_of_keys_serves_a_group_of_query_heads(attention: str) -> None:
    """Grouped heads give what as many heads as queries give whose weights are equal within a group."""
    grouped = build_program(CAUSAL["llama"], build(attention=attention)).module(1).eval()
    full = build_program(tiny_model(family="llama"), build(attention=attention)).module(1).eval()
    weights = dict(full.named_parameters())
    with torch.no_grad():
        for name, value in grouped.named_parameters():
            if name.endswith("qkv.weight"):
                query, key, value_rows = value.split((32, 16, 16))
                spread = [part.view(2, 1, 8, 32).expand(2, 2, 8, 32).reshape(32, 32) for part in (key, value_rows)]
                value = torch.cat([query, *spread])
            weights[name].copy_(value)
    given = batch([[5, 7], [4, 4]])
    torch.testing.assert_close(logits(grouped, given), logits(full, given), rtol=1e-5, atol=1e-5)


def test_what_travels_between_layers(config: TransformerSection) -> None:
    """From the embeddings on hidden states, sequence ids and starts; the last layers get hidden states alone."""
    descriptions = build_program(config, build()).layers
    names = [description.name for description in descriptions]
    final = ["final_layer_norm"] if config.family == "gpt2" else []
    assert names == ["word_embeddings", "embeddings", "decoder.0", "decoder.1", *final, "word_embeddings"]
    assert [description.block for description in descriptions].count(True) == config.num_layers
    model = build_program(config, build()).module(1).eval()
    tensors = batch([[5, 7], [3]]).fields
    for index, (description, module, _) in enumerate(model._steps):
        written = module(*(tensors[name] for name in description.reads), **description.call_kwargs)
        tensors |= dict(zip(description.writes, (written,), strict=True))
        crossing = model.flow.before(index + 1)
        shapes = {name: tuple(tensors[name].shape) for name in crossing.names}
        if description.name in ("embeddings", "decoder.0"):
            assert shapes == {"hidden": (2, SEQ_LENGTH, 32), "sequence_ids": (2, SEQ_LENGTH), "sequence_starts": (2, 3)}
        elif description.name in ("decoder.1", "final_layer_norm"):
            assert shapes == {"hidden": (2, SEQ_LENGTH, 32)}
        if index > 0:
            assert crossing.with_gradient == (("hidden",) if index + 1 < len(names) else ("logits",))
    assert shapes == {"logits": (2, SEQ_LENGTH, 61)}


def test_recomputing_changes_no_gradient(config: TransformerSection) -> None:
    given = batch([[5, 7], [4, 4]])
    losses = TermLosses(OBJECTIVE.terms, OBJECTIVE.outputs, ParallelContext())
    gradients = []
    for recompute in (False, True):
        model = build_program(config, build(recompute)).module(1).train()
        losses(model.run(given.fields), given.fields, torch.ones(1))[0].backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert gradient is not None and gradient.abs().max() > 0 and torch.equal(gradient, gradients[1][name]), name
