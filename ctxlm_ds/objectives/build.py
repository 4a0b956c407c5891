"""From the recipe's objective section to the objective."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxlm_ds.config.schema import ObjectiveConfig
from ctxlm_ds.data.collate import MASKED_LM, NEXT_SENTENCE
from ctxlm_ds.objectives.corruption import MaskedTokenCorruption
from ctxlm_ds.objectives.masked_lm import MaskedLM

if TYPE_CHECKING:
    from ctxlm_ds.tokenizers.base import Tokenizer

TERMS: dict[str, tuple[str, ...]] = {"masked_lm": (MASKED_LM,), "masked_lm_nsp": (MASKED_LM, NEXT_SENTENCE)}
"""Loss terms by objective name, in the order of the model's outputs."""


def objective_terms(config: ObjectiveConfig) -> tuple[str, ...]:
    """Loss terms of an objective; the model has a head for each."""
    return TERMS[config.name]


def build_objective(config: ObjectiveConfig, tokenizer: Tokenizer) -> MaskedLM:
    """The objective for one tokenizer; raises ConfigError as MaskedTokenCorruption does."""
    return MaskedLM(MaskedTokenCorruption(config, tokenizer), objective_terms(config))
