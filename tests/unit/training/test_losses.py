"""A step's figures from its sums."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ctxlm_ds.objectives.base import LossTerm
from ctxlm_ds.objectives.build import build_objective
from ctxlm_ds.training.losses import means, perplexity, weighted_total
from tests.sections import objective_section


def term(name: str, **settings: Any) -> LossTerm:
    return LossTerm(name, (), (), **settings)


def test_means_are_over_each_terms_own_labels() -> None:
    sums = {"a/loss_sum": 6.0, "a/correct": 1.0, "a/count": 4.0, "b/loss_sum": 0.0, "b/correct": 0.0, "b/count": 0.0}
    assert means([term("a"), term("b")], sums) == ({"a": 1.5, "b": 0.0}, {"a": 0.25, "b": 0.0})
    assert means([term("a"), term("b", has_accuracy=False)], sums) == ({"a": 1.5, "b": 0.0}, {"a": 0.25})


def test_a_steps_loss_has_the_terms_weights() -> None:
    assert weighted_total([term("a"), term("b", weight=50.0)], {"a": 1.5, "b": 0.25}) == 14.0


def test_perplexity_is_a_causal_models() -> None:
    both = build_objective(objective_section()).terms
    causal = build_objective(objective_section(name="causal_lm")).terms
    assert perplexity(both, {"masked_lm": 2.0, "next_sentence": 0.5}) == {}
    assert perplexity(causal, {"causal_lm": math.log(50.0)}) == {"perplexity": pytest.approx(50.0)}
    assert perplexity(causal, {"causal_lm": 1e4}) == {"perplexity": math.inf}
    assert math.isnan(perplexity(causal, {"causal_lm": math.nan})["perplexity"])
