"""From the recipe's objective section to the objective."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxlm_ds.objectives.causal_lm_old import CausalLM
from ctxlm_ds.objectives.corruption import MaskedTokenCorruption
from ctxlm_ds.objectives.masked_lm_old import MaskedLM
from ctxlm_ds.recipe.schema import ObjectiveConfig
from ctxlm_ds.registry import OBJECTIVES

if TYPE_CHECKING:
    from ctxlm_ds.tokenizers.base import Tokenizer

TrainingObjective = MaskedLM | CausalLM


def objective_terms(config: ObjectiveConfig) -> tuple[str, ...]:
    return tuple(term.name for term in OBJECTIVES.get(config.name).terms)


def build_objective(config: ObjectiveConfig, tokenizer: Tokenizer) -> TrainingObjective:
    if config.name == "causal_lm":
        built = CausalLM()
    else:
        built = MaskedLM(MaskedTokenCorruption(config, tokenizer), ())
    built.terms = OBJECTIVES.get(config.name).terms
    built.outputs = OBJECTIVES.get(config.name).outputs
    return built
