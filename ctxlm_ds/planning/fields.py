"""The fields of a micro-batch with their columns. TO BE REPLACED by `objective.fields(data)` (objectives/base.py)."""

from __future__ import annotations

from ctxlm_ds.data.stream.collate import prediction_slots
from ctxlm_ds.objectives.base import Field
from ctxlm_ds.recipe.schema import RunConfig


def batch_fields(config: RunConfig) -> tuple[Field, ...]:
    """Return every field that the objective fills."""
    length, sequences = config.data.seq_length, config.data.sequences_per_row
    slots = prediction_slots(config.data, config.objective)
    columns = {
        "input_ids": length,
        "token_type_ids": length,
        "position_ids": length,
        "sequence_ids": length,
        "sequence_starts": sequences + 1,
        "prediction_positions": slots,
        "cls_positions": sequences,
        "masked_lm_labels": slots,
        "causal_lm_labels": length,
        "next_sentence_labels": sequences,
    }
    return tuple(Field(name, count) for name, count in columns.items())
