"""Ranks, token types and shares of the kinds against the masks of the published code, restated for one row."""

from __future__ import annotations

import numpy as np
import pytest

from ctxlm_ds.data.sample import starts_of
from ctxlm_ds.objectives.corruption.kinds import (
    BIDIRECTIONAL,
    LEFT_TO_RIGHT,
    RIGHT_TO_LEFT,
    SEQUENCE_TO_SEQUENCE,
    kind_shares,
    one_text,
    rank_tokens,
)
from tests.ragged import CLS, SEP, one_sample, pair_sample, samples_from

PUBLISHED = (1 / 3, 1 / 6, 1 / 6, 1 / 3)


def published(task: int, first: int, second: int) -> tuple[np.ndarray, list[int]]:
    """What each position sees, and token types (unilm-v1 modeling.py, BertForPreTrainingLossMask.forward)."""
    total = first + second
    mask = np.zeros((total, total), dtype=bool)
    for query in range(total):
        for key in range(total):
            before = key <= query
            mask[query, key] = {0: True, 1: before, 2: query <= key, 3: key < first or before}[task]
    in_first = [place < first for place in range(total)]
    types = [task + 1 + (task == 3) - (inside and task in (0, 3)) for inside in in_first]
    return mask, types


def test_ranks_and_types_are_the_masks_of_the_published_code() -> None:
    rng = np.random.default_rng(0)
    tasks = rng.integers(0, 4, size=60)
    first, second = rng.integers(2, 9, size=60), rng.integers(1, 9, size=60)
    starts = starts_of(first + second)
    # A text that is read in one direction has no second segment, and in the code the types of both are the same.
    ranks, types = rank_tokens(starts, np.where(np.isin(tasks, (1, 2)), first + second, first), tasks.astype(np.int8))
    for number, task in enumerate(tasks.tolist()):
        here = slice(starts[number], starts[number + 1])
        mask, wanted = published(task, int(first[number]), int(second[number]))
        assert np.array_equal(ranks[here][None] <= ranks[here][:, None], mask)
        assert types[here].tolist() == wanted


def test_a_text_in_one_direction_has_no_separator_inside() -> None:
    a, b = np.array([10, 11, 12]), np.array([20, 21])
    samples = samples_from([pair_sample(a, b, label) for label in (0, 0, 0, 1, 1)])
    kinds = np.array([BIDIRECTIONAL, LEFT_TO_RIGHT, SEQUENCE_TO_SEQUENCE, RIGHT_TO_LEFT, BIDIRECTIONAL], dtype=np.int8)
    joined = one_text(samples, kinds)
    texts = [one_sample(joined, number) for number in range(len(kinds))]
    pair = [CLS, 10, 11, 12, SEP, 20, 21, SEP]
    assert [text.input_ids.tolist() for text in texts] == [
        pair, [CLS, 10, 11, 12, 20, 21, SEP], pair, [CLS, 10, 11, 12, SEP], pair,
    ]  # fmt: skip
    assert [int(text.token_type_ids.sum()) for text in texts] == [3, 0, 3, 0, 3]
    assert [text.special_mask.sum() for text in texts] == [3, 2, 3, 2, 3]


@pytest.mark.parametrize("random", [0.0, 0.1, 1 / 6, 0.3, 0.5, 0.6, 2 / 3])
def test_shares_are_those_wanted_for_any_share_of_random_pairs(random: float) -> None:
    follows, of_random = kind_shares(PUBLISHED, random)
    assert (1 - random) * follows + random * of_random == pytest.approx(PUBLISHED)
    assert follows.sum() == pytest.approx(1) and of_random[SEQUENCE_TO_SEQUENCE] == 0
    if 1 / 6 <= random <= 0.5:
        assert random * of_random[BIDIRECTIONAL] == pytest.approx(1 / 6)  # next-sentence prediction is balanced


def test_pairs_of_a_sort_that_the_training_text_lacks_are_bidirectional() -> None:
    assert kind_shares(PUBLISHED, 0.0)[1].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert kind_shares(PUBLISHED, 0.0)[0] == pytest.approx(PUBLISHED)
