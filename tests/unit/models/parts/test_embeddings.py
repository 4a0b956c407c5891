"""Embeddings: where positions begin."""

from __future__ import annotations

from tests.encoder_batches import OUTPUTS, random_batch, tiny_model
from tests.unit.models.parts.test_encoder import SEQ_LENGTH, model_of


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
