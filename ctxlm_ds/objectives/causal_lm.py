"""Causal language modelling (GPT): every position predicts the next token of its own text."""

from __future__ import annotations

from ctxlm_ds.objectives.base import LossTerm, Objective
from ctxlm_ds.recipe.sections import ObjectiveSection


class CausalLMSection(ObjectiveSection):
    """The next token at every position (GPT)."""

    name: str = "causal_lm"


class CausalLM(Objective):
    """The objective of GPT; nothing is replaced and nothing is drawn."""

    name = "causal_lm"
    section = CausalLMSection
    outputs = ("logits",)
    terms = (LossTerm("causal_lm", ("logits",), ("causal_lm_labels",), has_perplexity=True),)
    shifted = True
