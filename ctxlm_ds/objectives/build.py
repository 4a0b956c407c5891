"""Building the objective of a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxlm_ds.objectives.base import Objective
from ctxlm_ds.recipe.sections import ObjectiveSection
from ctxlm_ds.registry import OBJECTIVES

if TYPE_CHECKING:
    from ctxlm_ds.tokenizers.base import Tokenizer


def build_objective(section: ObjectiveSection, tokenizer: Tokenizer | None = None) -> Objective:
    """Build the objective that a section names; without a tokenizer it has terms and fields, but cannot corrupt.

    Raises:
        ConfigError, TokenizerError: the section does not go with the tokenizer.
    """
    built: Objective = OBJECTIVES.get(section.name)(section, tokenizer)
    return built
