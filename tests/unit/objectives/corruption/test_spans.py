"""Spans, n-grams, span boundaries and MASS's blocks against the published rules as slow loops."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from ctxlm_ds.data.fields import IGNORE_LABEL, MOST_BOUNDARY_TARGETS
from ctxlm_ds.data.numba_random import below, stream, stream_key, uniform, word_at
from ctxlm_ds.data.sample import NO_LABEL, Example
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.objectives.corruption.spans import SpanRules, mask_spans
from tests.ragged import Rows, Sample, collate, each, pair_sample, samples_from, single_sample
from tests.sample_data import FIRST_WORD_ID, FakeTokenizer
from tests.sections import objective_section

TOKENIZER = FakeTokenizer()
SPANBERT = {
    "name": "masked_lm", "whole_word": True, "spans": "geometric", "replace_spans": True, "count_rounding": "up",
}  # fmt: skip
ALBERT = {"name": "masked_lm", "whole_word": True, "spans": "ngram", "max_span_length": 3, "special_tokens": "bert"}
UNILM = {"name": "masked_lm", "spans": "skipgram", "max_span_length": 3}
BUDGET = 10_000


def text(rng: np.random.Generator, size: int) -> NDArray[np.int64]:
    """Words of one to three tokens: even ids begin a word, odd ones continue it."""
    starts = rng.random(size) < 0.7
    starts[0] = True
    ids = 2 * rng.integers(FIRST_WORD_ID, TOKENIZER.vocab_size // 2, size=size)
    return np.where(starts, ids, ids + 1 - 2 * (ids + 1 >= TOKENIZER.vocab_size))


def texts(count: int, size: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [single_sample(text(rng, size)) for _ in range(count)]


def corrupt(samples: Sequence[Sample], budget: int = BUDGET, **settings: object) -> list[Example]:
    objective = build_objective(objective_section(**settings), TOKENIZER)
    return each(objective.corrupt_batch(samples_from(samples), stream_key(1, "mask"), np.full(len(samples), budget)))


def runs_of(positions: Sequence[int]) -> list[tuple[int, int]]:
    """First and last position of each run."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][1] + 1 == position:
            runs[-1] = runs[-1][0], position
        else:
            runs.append((position, position))
    return runs


def words_of(sample: Sample) -> list[list[int]]:
    """Positions of each word of the text, special tokens left out."""
    starts, words = TOKENIZER.word_start_mask(), []
    for position, token in enumerate(sample.input_ids.tolist()):
        if sample.special_mask[position]:
            continue
        if starts[token] or not words or sample.special_mask[position - 1]:
            words.append([])
        words[-1].append(position)
    return words


def state_of(number: int) -> np.uint64:
    return np.uint64(stream(stream_key(1, "mask"), number, 0, 0))


def pairs(count: int, seed: int) -> list[Sample]:
    """Pairs of texts, some shorter than a span."""
    rng = np.random.default_rng(seed)
    return [pair_sample(text(rng, int(rng.integers(1, 40))), text(rng, 30)) for _ in range(count)]


def spanbert_corruption(sample: Sample, number: int, share: float) -> tuple[set[int], list[int]]:
    """masking.py, PairWithSpanMaskingScheme, with this project's draws.

    Returns:
        The positions predicted, and the corrupted tokens: one draw of mask, kept or random for each run.
    """
    state, words, masked, draw = state_of(number), words_of(sample), set[int](), 0
    owners = {position: place for place, word in enumerate(words) for position in word}
    ends = np.cumsum(0.8 ** np.arange(10)) / np.sum(0.8 ** np.arange(10))
    first, after = words[0][0], words[-1][-1] + 1
    while len(masked) < math.ceil(share * len(owners)):
        word = np.uint64(word_at(state, 1 + 2 * draw))
        draw += 1
        anchor = first + int(below(word, after - first))
        if anchor not in owners or anchor in masked:
            continue
        length = 1 + int((ends[:-1] <= int(word) % 2**32 / 2**32).sum())
        run = [position for member in words[owners[anchor] : owners[anchor] + length] for position in member]
        for place, position in enumerate(run):
            if position - place != run[0]:
                break  # a special token
            if len(masked) < math.ceil(share * len(owners)):
                masked.add(position)
    ids, drawable, action = sample.input_ids.tolist(), range(FIRST_WORD_ID, TOKENIZER.vocab_size), 0.0
    for position in sorted(masked):
        drawn = int(np.uint64(word_at(state, 2 + 2 * position)))
        if position - 1 not in masked:
            action = (drawn >> 32) / 2**32
        if action < 0.8:
            ids[position] = TOKENIZER.mask_id
        elif action >= 0.9:
            ids[position] = drawable[(drawn % 2**32) * len(drawable) >> 32]
    return masked, ids


@pytest.mark.parametrize("share", [0.15, 0.6])
def test_spans_are_those_of_the_published_code_with_the_same_draws(share: float) -> None:
    samples, kinds = [*texts(200, 100), *pairs(400, 4)], Counter[str]()
    examples = corrupt(samples, mask_prob=share, **SPANBERT)
    for number, (sample, example) in enumerate(zip(samples, examples, strict=True)):
        positions, ids = spanbert_corruption(sample, number, share)
        assert example.prediction_positions.tolist() == sorted(positions)
        assert example.input_ids.tolist() == ids
        for first, last in runs_of(sorted(positions)):
            seen, before = ids[first : last + 1], sample.input_ids[first : last + 1].tolist()
            kind = "mask" if set(seen) == {TOKENIZER.mask_id} else "kept" if seen == before else "random"
            kinds[kind] += last > first
    assert min(kinds.values()) > 20 and len(kinds) == 3


def albert_positions_drawn(sample: Sample, number: int, wanted: int) -> set[int]:
    """create_pretraining_data.py, create_masked_lm_predictions, with this project's draws."""
    state, words = state_of(number), words_of(sample)
    order, masked = list(range(len(words))), set()
    for turn in range(len(words)):
        word = np.uint64(word_at(state, 1 + 2 * turn))
        drawn = turn + int(below(word, len(words) - turn))
        order[turn], order[drawn] = order[drawn], order[turn]
        longest = min(3, len(words) - order[turn])
        left, length = (int(word) % 2**32) / 2**32 * sum(1 / n for n in range(1, longest + 1)), 1
        while length < longest and left >= 1 / length:
            left, length = left - 1 / length, length + 1
        ngram = words[order[turn] : order[turn] + length]
        while ngram and len(masked) + sum(map(len, ngram)) > wanted:
            ngram = ngram[:-1]
        positions = {position for member in ngram for position in member}
        if not positions & masked:
            masked |= positions
    return masked or set(words[order[0]][:wanted])


def test_ngrams_are_those_of_the_published_code_with_the_same_draws() -> None:
    samples = [*texts(200, 60), *pairs(200, 4)]
    for number, (sample, example) in enumerate(zip(samples, corrupt(samples, mask_prob=0.4, **ALBERT), strict=True)):
        wanted = max(1, round(0.4 * len(sample.input_ids)))
        assert set(example.prediction_positions.tolist()) == albert_positions_drawn(sample, number, wanted)


def unilm_positions(sample: Sample, number: int, wanted: int, p: float) -> set[int]:
    """loader_utils.py, get_masked_pos of tokens: shuffled candidates, each alone or with one or two after it."""
    state = state_of(number)
    special = {place for place in range(len(sample.input_ids)) if sample.special_mask[place]}
    candidates = [place for place in range(len(sample.input_ids)) if place not in special]
    masked: set[int] = set()
    for turn in range(len(candidates)):
        if len(masked) >= wanted:
            break
        word = np.uint64(word_at(state, 1 + 2 * turn))
        drawn = turn + int(below(word, len(candidates) - turn))
        candidates[turn], candidates[drawn] = candidates[drawn], candidates[turn]
        place = candidates[turn]
        if place in masked:
            continue
        share, size = (int(word) % 2**32) / 2**32, 1
        if share >= 1.0 - p:
            size = min(2 if share < 1.0 - p / 2 else 3, len(sample.input_ids) - place)
        span = 1
        for n in range(2, size + 1):
            if place + n - 1 in special or len(masked) + n > wanted:
                break
            span = n
        masked |= set(range(place, place + span))
    return masked


@pytest.mark.parametrize("p", [0.2, 0.9])
def test_skipgrams_are_those_of_the_published_code_with_the_same_draws(p: float) -> None:
    samples = pairs(400, 8)
    examples = corrupt(samples, span_prob=p, mask_prob=0.4, **UNILM)
    for number, (sample, example) in enumerate(zip(samples, examples, strict=True)):
        wanted = max(1, round(0.4 * len(sample.input_ids)))
        assert set(example.prediction_positions.tolist()) == unilm_positions(sample, number, wanted, p)


def test_a_budget_above_the_text_predicts_all_of_it() -> None:
    for example in corrupt(texts(20, 3), mask_prob=0.99, **SPANBERT):
        assert example.prediction_positions.tolist() == [1, 2, 3]
    assert {len(example.prediction_positions) for example in corrupt(texts(50, 100), budget=2, **ALBERT)} <= {1, 2}


def test_boundaries_are_the_tokens_around_a_run() -> None:
    """Against SpanBERT's span_masking: external endpoints, none at the edges, at most 15 targets a span."""
    rng = np.random.default_rng(8)
    samples = [pair_sample(text(rng, 40), text(rng, 30)) for _ in range(200)]
    section = objective_section(**SPANBERT, mask_prob=0.5, boundary_weight=1.0)
    objective = build_objective(section, TOKENIZER)
    laid = samples_from(samples)
    examples = objective.corrupt_batch(laid, stream_key(1, "mask"), np.full(len(samples), 48))
    batch = collate([[example] for example in each(examples)], objective, Rows(96)).fields
    arrays = {name: value.numpy() for name, value in batch.items()}
    skipped = cut = 0
    for row, (sample, example) in enumerate(zip(samples, each(examples), strict=True)):
        labels, offsets = arrays["boundary_labels"][row], arrays["boundary_offsets"][row]
        lefts, rights = np.split(arrays["boundary_positions"][row], 2)
        slot = 0
        for first, last in runs_of(example.prediction_positions.tolist()):
            inside = not sample.special_mask[first - 1] and not sample.special_mask[last + 1]
            skipped += not inside
            for offset, position in enumerate(range(first, last + 1)):
                if inside and offset < MOST_BOUNDARY_TARGETS:
                    wanted = (first - 1, last + 1, offset, sample.input_ids[position])
                    assert (lefts[slot], rights[slot], offsets[slot], labels[slot]) == wanted
                else:
                    cut += inside
                    assert labels[slot] == IGNORE_LABEL
                slot += 1
        assert (labels[slot:] == IGNORE_LABEL).all()
    assert skipped > 0 and cut > 0


@pytest.mark.parametrize(("special_tokens", "has_targets"), [("never", False), ("spanbert", True)])
def test_an_unknown_word_next_to_a_span_is_a_boundary(special_tokens: str, has_targets: bool) -> None:
    """SpanBERT's span_masking looks at the ends of the text alone; a special token that was inserted is never one."""
    objective = build_objective(
        objective_section(name="masked_lm", special_tokens=special_tokens, boundary_weight=1.0), TOKENIZER
    )
    ids = np.arange(3 * 40) + FIRST_WORD_ID
    ids[1::3] = TOKENIZER.unk_id
    samples = [single_sample(ids)] * 20
    examples = objective.corrupt_batch(samples_from(samples), stream_key(1, "mask"), np.full(20, 48))
    batch = collate([[example] for example in each(examples)], objective, Rows(128)).fields
    arrays = {name: value.numpy() for name, value in batch.items()}
    lefts, rights = np.split(arrays["boundary_positions"], 2, axis=1)
    used = arrays["boundary_labels"] != IGNORE_LABEL
    input_ids = np.concatenate(
        [np.take_along_axis(arrays["input_ids"], places, axis=1)[used] for places in (lefts, rights)]
    )
    assert ((input_ids == TOKENIZER.unk_id).sum() > 20) == has_targets
    assert used.sum() > 0 and not set(input_ids.tolist()) & {TOKENIZER.cls_id, TOKENIZER.sep_id}


KEY, MASK, VOCABULARY = stream_key(1, "mask"), 4, 500
TEXT = np.arange(5, VOCABULARY, dtype=np.int32)


def samples_of(lengths: list[int]) -> list[Sample]:
    rng = np.random.default_rng(0)
    rows = [rng.integers(5, VOCABULARY, size=length).astype(np.int32) for length in lengths]
    return [Sample(row, np.zeros_like(row), np.zeros(len(row), dtype=np.bool_), NO_LABEL) for row in rows]


def masked_by(samples: list[Sample], rules: SpanRules) -> list[tuple[list[int], list[int]]]:
    flat = samples_from(samples)
    ids, masked = np.empty_like(flat.input_ids), np.empty(len(flat.input_ids), dtype=np.bool_)
    mask_spans(flat, KEY, rules, ids, masked)
    bounds = list(zip(flat.starts, flat.starts[1:], strict=False))
    return [(ids[a:b].tolist(), np.flatnonzero(masked[a:b]).tolist()) for a, b in bounds]


@pytest.mark.parametrize("block_size", [1 << 30, 64, 7])
@pytest.mark.parametrize("lengths", [[1, 2, 3, 8], [200, 129, 65, 64]])
def test_same_draws_give_the_originals_spans(block_size: int, lengths: list[int]) -> None:
    """__getitem__ and replace: blocks from the second token on, a span of each, 80/10/10 of its tokens."""
    samples = samples_of(lengths)
    keys = samples_from(samples).keys
    for sample, key, (ids, masked) in zip(
        samples, keys, masked_by(samples, SpanRules(0.5, block_size, 0.1, 0.1, MASK, TEXT)), strict=True
    ):
        state = np.uint64(stream(KEY, *key))
        positions, wanted = np.arange(len(sample.input_ids)), []
        for begin in range(1, len(positions), block_size):
            block = positions[begin : begin + block_size]
            size = max(1, len(block) // 2)  # mask_len = max(1, int(len * 0.5))
            choices = block[: len(block) - size + 1]
            start = choices[below(np.uint64(word_at(state, 3 * begin)), len(choices))]
            wanted += positions[start : start + size].tolist()
        assert masked == wanted
        expected = sample.input_ids.copy()
        for position in wanted:
            draw = uniform(np.uint64(word_at(state, 3 * position + 1)))
            if 0.1 <= draw < 0.2:
                expected[position] = TEXT[below(np.uint64(word_at(state, 3 * position + 2)), len(TEXT))]
            elif draw >= 0.2:
                expected[position] = MASK
        assert ids == expected.tolist()


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5, 0.9])
def test_a_span_is_the_share_of_its_block_rounded_down(share: float) -> None:
    lengths = list(range(2, 40))
    for length, (_, masked) in zip(
        lengths, masked_by(samples_of(lengths), SpanRules(share, 99, 0, 0, MASK, TEXT)), strict=True
    ):
        assert len(masked) == max(1, math.floor((length - 1) * share))
