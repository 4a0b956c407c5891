"""Decoders: documents of a row do not see each other, and ranks may be positions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import ModelBuild
from ctxlm_ds.models.parts.transformer import transformer_block
from ctxlm_ds.models.program import build_program
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.training.engine.losses import TermLosses
from tests.encoder_batches import tiny_model
from tests.ragged import Rows, collate, text_examples
from tests.sections import objective_section

OBJECTIVE = build_objective(objective_section(name="causal_lm"))
SEQ_LENGTH = 12
CAUSAL = {
    "gpt2": tiny_model(family="gpt2", hidden_activation="gelu_tanh"),
    "gpt1": tiny_model(family="gpt1", hidden_activation="gelu_tanh"),
    "llama": tiny_model(family="llama", num_key_value_heads=2),
    "one head of keys": tiny_model(family="llama", num_key_value_heads=1, tie_word_embeddings=True),
}


def build(attention: str) -> ModelBuild:
    kernels = KernelSet({"attention": attention}, "cpu", torch.float32)
    return ModelBuild(OBJECTIVE.outputs, kernels, shares_rows=True)


@pytest.mark.parametrize("attention", ["sdpa", "bmm", "reference"])
@pytest.mark.parametrize("family", CAUSAL)
def test_documents_of_a_row_have_the_results_of_rows_of_their_own(family: str, attention: str) -> None:
    model = build_program(CAUSAL[family], build(attention)).module(1)
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


def test_ranked_layers_turn_by_position() -> None:
    """A layer whose ranks are the positions is a causal one, with rotary positions as well."""
    plain = next(layer for layer in build_program(CAUSAL["llama"], build("reference")).layers if layer.block)
    settings = plain.kwargs["settings"]
    spec = replace(settings.attention, causal=False, ranked=True)
    described = transformer_block("decoder.0", replace(settings, attention=spec), build("reference"))
    assert described.reads == (*plain.reads, "ranks")
    causal, ranked = (layer.factory(**layer.kwargs) for layer in (plain, described))
    generator = torch.Generator().manual_seed(0)
    for ours, theirs in zip(ranked.parameters(), causal.parameters(), strict=True):
        theirs.data = ours.data.normal_(generator=generator)
    positions = torch.arange(SEQ_LENGTH)[None]
    hidden = torch.randn(1, SEQ_LENGTH, CAUSAL["llama"].width, generator=generator)
    given = (hidden, torch.ones_like(positions), torch.tensor([[0, SEQ_LENGTH]]), positions)
    with torch.no_grad():
        got, wanted = ranked(*given, positions, **described.call_kwargs), causal(*given, **plain.call_kwargs)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
