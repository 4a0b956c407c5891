"""Sizes that follow from a model's family alone. Imports no torch, so that plans and models share them."""

from __future__ import annotations

from ctxlm_ds.recipe.schema import ModelConfig

ROBERTA_POSITION_OFFSET = 2
"""RoBERTa's positions begin after its padding id, 1; rows 0 and 1 of the table are never used."""


def position_offset(config: ModelConfig) -> int:
    """Row of the position table that holds position 0."""
    return ROBERTA_POSITION_OFFSET if config.family == "roberta" else 0
