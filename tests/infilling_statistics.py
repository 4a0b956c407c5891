"""Noise of BART in a dataset against denoising_dataset.py (fairseq), as slow loops with numpy's draws.

`python -m tests.objective_statistics` prints these figures for recipes of BART and mBART.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.numba_random import stream, stream_key
from ctxlm_ds.data.sample import Samples
from ctxlm_ds.data.stream.loader import TRAIN_MASKS
from ctxlm_ds.objectives.corruption.infilling import draw_lengths
from ctxlm_ds.recipe.schema import RunConfig
from tests.denoiser_statistics import ratio
from tests.objective_statistics import FEWEST, LONGEST_SHOWN, Figure, share, two_shares
from tests.ragged import one_sample
from tests.unit.objectives.corruption.infilling_reference import NumpyDraws, by_rule, span_lengths

RANDOM = np.int32(2**30)
"""Id that replaces every random token, to count them."""


class Noised(NamedTuple):
    """What became of a text."""

    words: int
    lacking_words: int
    """Words that are replaced."""
    masks: int
    random: int
    inputs: int
    """Tokens of the input."""
    moved: int
    """Tokens that sentence permutation alone moves."""
    tokens: int


def ours(samples: Samples, objective: Any, limit: int, key: np.uint64) -> Iterator[Noised]:
    """Yield what training makes of samples."""
    from ctxlm_ds.objectives.corruption.infilling import corrupt

    limits = np.full(len(samples.keys), limit)
    rules = objective._rules._replace(random_ids=np.array([RANDOM]))
    examples = corrupt(samples, key, limits, rules)
    still = rules._replace(mask_ratio=0.0, insert_ratio=0.0, rotate_prob=0.0)
    permuted = corrupt(samples, key, limits, still)
    for number in range(len(limits)):
        text, begins = text_of(samples, rules, number)
        ids, first = examples.example(number).input_ids, examples.target_starts[number]
        head = int(samples.language_ids[number] < 0)
        lacking = set(np.flatnonzero(examples.replaced[first + head : first + head + len(text)]).tolist())
        order = permuted.example(number).input_ids[head : head + len(text)]
        yield figures_of(text, begins, lacking, ids.tolist(), order.tolist(), rules)


def text_of(samples: Samples, rules: Any, number: int) -> tuple[list[int], set[int]]:
    """The tokens of a sample's text, and the places at which its words begin."""
    sample = one_sample(samples, number)
    inside = np.flatnonzero(~sample.special_mask)
    text = sample.input_ids[inside[0] : inside[-1] + 1].tolist()
    special = sample.special_mask[inside[0] : inside[-1] + 1]
    begins = {
        place
        for place in range(len(text))
        if place == 0 or special[place] or special[place - 1] or not len(rules.word_starts)
        or rules.word_starts[text[place]]
    }  # fmt: skip
    if samples.language_ids[number] >= 0:
        text.append(rules.sep_id)
        begins.add(len(text) - 1)
    return text, begins


def figures_of(text: list[int], begins: set[int], lacking: set[int], ids: list[int], order: list[int], rules: Any
               ) -> Noised:  # fmt: skip
    moved = sum(one != other for one, other in zip(text, order, strict=True))
    return Noised(
        len(begins), len(lacking & begins), ids.count(rules.mask_id), ids.count(int(RANDOM)), len(ids), moved, len(text)
    )


def by_the_rule(samples: Samples, objective: Any, rng: np.random.Generator) -> Iterator[Noised]:
    """Yield what the published rules make of samples."""
    rules, draws = objective._rules, NumpyDraws(rng, int(RANDOM))
    still = rules._replace(mask_ratio=0.0, insert_ratio=0.0, rotate_prob=0.0)
    for number in range(len(samples.keys)):
        text, begins = text_of(samples, rules, number)
        ids, lacking = by_rule(text, begins, rules, draws)
        order, _ = by_rule(text, begins, still, draws)
        frame = [rules.sep_id] * (2 - int(samples.language_ids[number] >= 0))
        yield figures_of(text, begins, lacking, [*ids, *frame], order, rules)


def infilling_figures(
    rows: RowSource, config: RunConfig, objective: Any, count: int, seed: int = 9
) -> Iterator[Figure]:
    """Every figure of text infilling over `count` rows."""
    rng, rules = np.random.default_rng(seed), objective._rules
    epochs, numbers = np.divmod(np.arange(count), len(rows))
    samples, _ = rows.samples(numbers, epochs)
    key = stream_key(config.training.seed, TRAIN_MASKS)
    found = list(ours(samples, objective, config.data.seq_length, key))
    published = list(by_the_rule(samples, objective, rng))
    for name, value, of in (
        ("replaced share of the words", "lacking_words", "words"),
        ("random share of the masks", "random", "shown"),
        ("masks of a text (mean)", "shown", None),
        ("tokens in (mean)", "inputs", None),
        ("moved share of the tokens", "moved", "tokens"),
    ):
        pairs = [
            [(_figure(one, value), 1.0 if of is None else _figure(one, of)) for one in side]
            for side in (found, published)
        ]
        if sum(weight for _, weight in pairs[0]) and sum(value for value, _ in pairs[0]):
            yield ratio(name, *pairs)
    if len(rules.length_ends) and rules.mask_ratio:
        states = [np.uint64(stream(key, *sample_key)) for sample_key in samples.keys]
        yield from _length_figures([one.words for one in found], states, rules, rng)


def _figure(noised: Noised, name: str) -> float:
    return float(noised.masks + noised.random if name == "shown" else getattr(noised, name))


def _length_figures(words: list[int], states: list[np.uint64], rules: Any, rng: np.random.Generator
                    ) -> Iterator[Figure]:  # fmt: skip
    budgets = [math.ceil(np.float32(number) * np.float32(rules.mask_ratio)) for number in words]
    budgeted = sum(budgets) / sum(words)
    drawn = [draw_lengths(budget, state, rules) for budget, state in zip(budgets, states, strict=True)]
    yield Figure("words of all spans, of the words", sum(int(lengths.sum()) for _, lengths in drawn) / sum(words),
                 budgeted, 0.0)  # fmt: skip
    draws = NumpyDraws(rng, int(RANDOM))
    rule = [span_lengths(budget, rules, draws) for budget in budgets]
    empty, spans = sum(int(zeros) for zeros, _ in drawn), sum(len(lengths) for _, lengths in drawn)
    # The last span is never empty, but their expected number is that of independent draws (Wald).
    yield share("spans of no word", empty, empty + spans, float(rules.length_ends[0]))
    yield ratio(
        "words of a span (mean)",
        [(float(lengths.sum()), float(zeros + len(lengths))) for zeros, lengths in drawn],
        [(float(sum(lengths)), float(len(lengths))) for lengths in rule],
    )
    counts = Counter(length for _, lengths in drawn for length in lengths.tolist())
    by_rules = Counter(length for lengths in rule for length in lengths if length)
    for size in range(1, LONGEST_SHOWN + 1):
        if counts[size] >= FEWEST:
            name = f"spans of {size} word{'s' * (size > 1)}"
            yield two_shares(name, counts[size], counts.total(), by_rules[size], by_rules.total())
