"""A step's figures from its sums."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ctxlm_ds.objectives.base import LossTerm, build_objective
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.training.engine.losses import TokenChoice, means, perplexity, word_perplexity
from tests.sections import objective_section


def term(name: str, **settings: Any) -> LossTerm:
    return LossTerm(name, (), (), **settings)


def test_means_are_over_each_terms_own_labels() -> None:
    sums = {"a/loss_sum": 6.0, "a/correct": 1.0, "a/count": 4.0, "b/loss_sum": 0.0, "b/correct": 0.0, "b/count": 0.0}
    assert means([term("a"), term("b")], sums) == ({"a": 1.5, "b": 0.0}, {"a": 0.25, "b": 0.0})
    assert means([term("a"), term("b", has_accuracy=False)], sums) == ({"a": 1.5, "b": 0.0}, {"a": 0.25})


def test_perplexity_is_a_causal_models() -> None:
    both = build_objective(objective_section()).terms
    causal = build_objective(objective_section(name="causal_lm")).terms
    assert perplexity(both, {"masked_lm": 2.0, "next_sentence": 0.5}) == {}
    assert perplexity(causal, {"causal_lm": math.log(50.0)}) == {"perplexity": pytest.approx(50.0)}
    assert perplexity(causal, {"causal_lm": 1e4}) == {"perplexity": math.inf}
    assert math.isnan(perplexity(causal, {"causal_lm": math.nan})["perplexity"])


def test_the_perplexity_of_words_is_that_of_the_total_loss_over_the_words() -> None:
    losses, words = [2.0, 0.5, 3.5, 1.0], 2
    mean = sum(losses) / len(losses)
    assert word_perplexity(math.exp(mean), len(losses) / words) == pytest.approx(math.exp(sum(losses) / words))
    assert word_perplexity(math.inf, 1.5) == word_perplexity(math.exp(600.0), 1.5) == math.inf


def test_draws_depend_on_key_and_place_and_follow_the_temperature() -> None:
    choice = TokenChoice("logits", 0.5, ParallelContext())
    count = 4000
    logits = torch.tensor([0.0, 1.0, float("-inf")]).expand(count, 1, 3)
    choice.places, choice.keys = [0] * count, list(range(count))
    choice({"logits": logits}, {}, torch.ones(1))
    first = choice.chosen
    assert sum(first) / count == pytest.approx(torch.sigmoid(torch.tensor(2.0)).item(), abs=0.02)
    choice({"logits": logits}, {}, torch.ones(1))
    assert choice.chosen == first
    choice.keys = [key + count for key in choice.keys]
    choice({"logits": logits}, {}, torch.ones(1))
    assert choice.chosen != first
