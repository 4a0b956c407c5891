"""A step's figures from its sums."""

from __future__ import annotations

import math

import pytest

from ctxlm_ds.training.figures import means, perplexity


def test_means_are_over_each_terms_own_labels() -> None:
    sums = {"a/loss_sum": 6.0, "a/correct": 1.0, "a/count": 4.0, "b/loss_sum": 0.0, "b/correct": 0.0, "b/count": 0.0}
    assert means(("a", "b"), sums) == ({"a": 1.5, "b": 0.0}, {"a": 0.25, "b": 0.0})


def test_perplexity_is_a_causal_models() -> None:
    assert perplexity({"masked_lm": 2.0, "next_sentence": 0.5}) == {}
    assert perplexity({"causal_lm": math.log(50.0)}) == {"perplexity": pytest.approx(50.0)}
    assert perplexity({"causal_lm": 1e4}) == {"perplexity": math.inf}
    assert math.isnan(perplexity({"causal_lm": math.nan})["perplexity"])
