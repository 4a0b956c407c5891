"""From the recipe's objective section to the objective."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxlm_ds.data.stream.collate import CAUSAL_LM, MASKED_LM, NEXT_SENTENCE
from ctxlm_ds.objectives.causal_lm_old import CausalLM
from ctxlm_ds.objectives.corruption import MaskedTokenCorruption
from ctxlm_ds.objectives.masked_lm_old import MaskedLM
from ctxlm_ds.recipe.sections import ObjectiveSection

if TYPE_CHECKING:
    from ctxlm_ds.tokenizers.base import Tokenizer

TrainingObjective = MaskedLM | CausalLM

TERMS: dict[str, tuple[str, ...]] = {
    "masked_lm": (MASKED_LM,),
    "masked_lm_nsp": (MASKED_LM, NEXT_SENTENCE),
    "causal_lm": (CAUSAL_LM,),
}
"""Loss terms by objective name, in the order of the model's outputs."""


def objective_terms(config: ObjectiveSection) -> tuple[str, ...]:
    """Loss terms of an objective; the model has a head for each."""
    return TERMS[config.name]


def build_objective(config: ObjectiveSection, tokenizer: Tokenizer) -> TrainingObjective:
    """The objective for one tokenizer; raises ConfigError and TokenizerError as MaskedTokenCorruption does."""
    if config.name == "causal_lm":
        return CausalLM()
    return MaskedLM(MaskedTokenCorruption(config, tokenizer), objective_terms(config))
