"""Targets and visibility beside XLNet's algorithm, written down here with the same draws."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from ctxlm_ds.data.numba_random import below, stream, stream_key, word_at
from ctxlm_ds.data.sample import NO_LABEL
from ctxlm_ds.objectives.corruption.permutation import (
    HALF_WORDS,
    ORDER_WORDS,
    PermutationRules,
    draw_order,
    permute_samples,
)
from ctxlm_ds.objectives.corruption.spans import draw_length, ngram_shares
from tests.ragged import Sample, samples_from

KEY = stream_key(1, "mask")
VOCABULARY, SEP, CLS, FIRST_WORD = 500, 4, 3, 9
BEGINS = np.arange(VOCABULARY) % 3 != 0
Bits = NDArray[np.bool_]


def rules_of(perm_size: int = 1 << 30, context: int = 6, predicted: int = 1) -> PermutationRules:
    return PermutationRules(ngram_shares(5), context, predicted, perm_size, BEGINS)


def rows(count: int, length: int) -> list[Sample]:
    """Half a row of text, then A <sep> B <sep> <cls>."""
    rng = np.random.default_rng(0)
    found = []
    for ids in rng.integers(FIRST_WORD, VOCABULARY, size=(count, length)).astype(np.int32):
        places = [int(rng.integers(length // 2 + 1, length - 3)), length - 2, length - 1]
        ids[places] = SEP, SEP, CLS
        special = np.isin(np.arange(length), places)
        found.append(Sample(ids, np.zeros_like(ids), special, NO_LABEL))
    return found


def permuted(
    samples: list[Sample], goal: int, rules: PermutationRules, backward: bool = False
) -> list[tuple[NDArray[np.int32], Bits]]:
    """The ranks and targets of each."""
    flat = samples_from(samples)
    ranks, targets = np.empty(len(flat.input_ids), np.int32), np.empty(len(flat.input_ids), np.bool_)
    count = len(samples)
    permute_samples(flat, KEY, np.full(count, goal), np.full(count, backward), rules, ranks, targets)
    return [(ranks[a:b], targets[a:b]) for a, b in zip(flat.starts, flat.starts[1:], strict=False)]


def state_of(number: int, samples: list[Sample]) -> np.uint64:
    return np.uint64(stream(KEY, *samples_from(samples).keys[number]))


# The published algorithm.


class Draws:
    """The words of a half's stream in the order in which the original draws."""

    def __init__(self, state: np.uint64, half: int) -> None:
        self.state, self.half, self.spans, self.tokens = state, half, 0, 0

    def span(self) -> np.uint64:
        self.spans += 1
        return np.uint64(word_at(self.state, self.half * HALF_WORDS + 2 * (self.spans - 1)))

    def token(self, length: int) -> int:
        self.tokens += 1
        return below(np.uint64(word_at(self.state, self.half * HALF_WORDS + 2 * self.tokens - 1)), length)


def sample_mask(
    seg: NDArray[np.int32], draws: Draws, goal: int, reverse: bool, mask_alpha: int, mask_beta: int
) -> Bits:
    """_sample_mask."""
    mask = np.zeros(len(seg), dtype=np.bool_)
    seg = np.flip(seg) if reverse else seg
    num_predict = cur_len = 0
    while cur_len < len(seg):
        if num_predict >= goal:
            break
        word = draws.span()
        n = min(int(draw_length(word, ngram_shares(5), 5)), goal - num_predict)
        ctx_size = (n * mask_alpha) // mask_beta
        left = below(word, ctx_size)
        beg = cur_len + left
        while beg < len(seg) and not BEGINS[seg[beg]]:
            beg += 1
        if beg >= len(seg):
            break
        end, grams = beg + 1, 1
        while end < len(seg):
            if BEGINS[seg[beg]]:
                grams += 1
                if grams > n:
                    break
            end += 1
        if end >= len(seg):
            break
        mask[beg:end] = True
        num_predict += end - beg
        cur_len = end + ctx_size - left
    while num_predict < goal:
        place = draws.token(len(seg))
        if not mask[place]:
            mask[place] = True
            num_predict += 1
    return np.flip(mask) if reverse else mask


def local_perm(is_functional: Bits, is_masked: Bits, index: NDArray[np.int64]) -> tuple[Bits, Bits]:
    """_local_perm: True in the mask [i, j] if i does not attend to j; and the targets."""
    non_mask = ~is_masked & ~is_functional
    rev_index = np.where(non_mask, -1, index)
    target = ~non_mask & ~is_functional
    self_rev_index = np.where(target, rev_index, rev_index + 1)
    return (self_rev_index[:, None] <= rev_index[None, :]) & ~non_mask, target


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("length", "goal", "perm_size"), [(512, 85, 256), (64, 10, 8), (64, 50, 32), (21, 7, 4)])
@pytest.mark.parametrize(("mask_alpha", "mask_beta"), [(6, 1), (7, 2), (20, 3)])
def test_same_draws_give_the_originals_targets_and_masks(
    length: int, goal: int, perm_size: int, backward: bool, mask_alpha: int, mask_beta: int
) -> None:
    samples = rows(30, length)
    middle = length // 2
    for number, (ranks, targets) in enumerate(
        permuted(samples, goal, rules_of(perm_size, mask_alpha, mask_beta), backward)
    ):
        sample, state = samples[number], state_of(number, samples)
        hidden = np.zeros((length, length), dtype=np.bool_)
        hidden[:middle, middle:] = True
        wanted = np.zeros(length, dtype=np.bool_)
        for half, part in enumerate((slice(0, middle), slice(middle, length))):
            count = goal // 2 if half else goal - goal // 2
            mask = sample_mask(sample.input_ids[part], Draws(state, half), count, backward, mask_alpha, mask_beta)
            assert mask.sum() == count
            index = np.empty(len(mask), dtype=np.int64)
            draw_order(index, perm_size, state, half * HALF_WORDS + ORDER_WORDS)
            hidden[part, part], wanted[part] = local_perm(sample.special_mask[part], mask, index)
        assert np.array_equal(targets, wanted)
        of_queries = ranks - targets
        assert np.array_equal(ranks[None, :] > of_queries[:, None], hidden)
        seen = ranks[None, :] <= ranks[:, None]
        assert np.array_equal(seen, ~hidden | np.eye(length, dtype=np.bool_))


@pytest.mark.parametrize(("length", "perm_size"), [(256, 1 << 30), (256, 64), (10, 4), (1, 4), (0, 4)])
def test_an_order_is_a_permutation_the_same_in_each_block(length: int, perm_size: int) -> None:
    order = np.empty(length, dtype=np.int64)
    draw_order(order, perm_size, np.uint64(9), ORDER_WORDS)
    size = min(perm_size, length)
    assert sorted(order[:size]) == list(range(size)) and len(set(order)) == length
    assert all(order[place] == order[place - size] + size for place in range(size, length))
    if length == size and length > 1:
        other = np.empty(length, dtype=np.int64)
        draw_order(other, perm_size, np.uint64(10), ORDER_WORDS)
        assert order.tolist() != other.tolist() and order.tolist() != sorted(order)


def test_orders_are_uniform() -> None:
    counts: Counter[tuple[int, ...]] = Counter()
    for state in range(6000):
        order = np.empty(3, dtype=np.int64)
        draw_order(order, 3, np.uint64(state), ORDER_WORDS)
        counts[tuple(order.tolist())] += 1
    assert len(counts) == 6 and all(abs(times - 1000) < 4 * np.sqrt(6000 * 5 / 36) for times in counts.values())
