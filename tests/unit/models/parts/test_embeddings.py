"""Embeddings: where positions begin, and where they begin again."""

from __future__ import annotations

import pytest
import torch

from ctxlm_ds.data.sample import Batch
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.models.program import build_program
from tests.encoder_batches import OUTPUTS, random_batch, tiny_model
from tests.unit.models.parts.test_encoder import SEQ_LENGTH, model_of
from tests.unit.models.parts.test_transformer import CONFIGS, batch, build, logits


def test_positions_begin_at_zero_for_bert_and_at_two_for_roberta() -> None:
    for family, offset in (("bert", 0), ("roberta", 2)):
        config = tiny_model(family=family)
        model = model_of(config, shares_rows=True, outputs=OUTPUTS[:1])
        batch = random_batch([[9, 6]], config, SEQ_LENGTH, ("masked_lm",))
        model.run(batch.fields)["predicted_logits"].square().sum().backward()
        table = model.embeddings.position_embeddings.weight
        assert table.shape[0] == config.max_position_embeddings + offset
        used = table.grad.abs().sum(dim=1).nonzero().flatten().tolist()
        assert used == list(range(offset, offset + 9))


@pytest.fixture(params=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> TransformerSection:
    return CONFIGS[request.param]


def test_positions_restart_at_documents(config: TransformerSection) -> None:
    model = build_program(config, build()).module(1).eval()
    given = batch([[5, 7]])
    alone = Batch(
        {
            "input_ids": given.fields["input_ids"][:, 5:],
            "position_ids": torch.arange(7)[None],
            "sequence_ids": torch.ones(1, 7, dtype=torch.long),
            "sequence_starts": torch.tensor([[0, 7, 7]]),
        }
    )
    torch.testing.assert_close(logits(model, given)[:, 5:], logits(model, alone), rtol=1e-5, atol=1e-5)
