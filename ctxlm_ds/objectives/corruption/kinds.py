"""The kind of language model of each sample, and what its positions see (Dong 2019, sections 2.2 and 2.3), compiled.

Source: microsoft/unilm unilm-v1 modeling.py (BertForPreTrainingLossMask), whose `task_idx` is the kind. A position sees
those whose rank is not above its own:

    kind                   ranks of positions 0 to n - 1 with m tokens of the first segment    token types
    bidirectional          0                                                                   0, 1
    left-to-right          0, 1, ... n - 1                                                     2
    right-to-left          n - 1, ... 1, 0                                                     3
    sequence-to-sequence   0 in the first segment, then 1, 2, ... n - m                        4, 5
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.numba_random import compiled, mix, stream, uniform, word_at
from ctxlm_ds.data.sample import Ids, Places, Samples, Shares, starts_of

BIDIRECTIONAL, LEFT_TO_RIGHT, RIGHT_TO_LEFT, SEQUENCE_TO_SEQUENCE = range(4)
FIRST_TYPES = np.array([0, 2, 3, 4], dtype=np.int32)
RANDOM = 1
"""Label of a pair whose second segment is of another document."""


def kind_shares(wanted: tuple[float, float, float, float], random: float) -> Shares:
    """Return the shares [2, 4] of the kinds among pairs that follow each other and among random ones.

    `wanted` is the share of each kind among all samples, together 1, and `random` that of the random pairs, at most 1
    without that of sequence-to-sequence. Half of the bidirectional samples are random pairs, for next-sentence
    prediction, if there are enough of both. A source and its target always follow each other. A random pair that is
    read in one direction is its first segment.
    """
    both, left, right, target = wanted
    both_random = min(both, random, max(both / 2, both + target + random - 1.0))
    single = (random - both_random) / max(left + right, 1e-9)
    of_random = np.array([both_random, left * single, right * single, 0.0])
    shares = np.stack([wanted - of_random, of_random]).clip(0.0)
    # A held-out text may have pairs of a sort that the training text lacks; they are read in both directions.
    shares[shares.sum(axis=1) == 0.0, 0] = 1.0
    return np.asarray(shares / np.maximum(shares.sum(axis=1, keepdims=True), 1e-9))


@compiled
def draw_kinds(samples: Samples, key: np.uint64, shares: Shares) -> NDArray[np.int8]:
    """Draw the kind [c] of each sample from the shares of kind_shares; the label of a pair is 1 if it is random."""
    kinds = np.zeros(len(samples.sequence_labels), dtype=np.int8)
    for number in range(len(kinds)):
        # The streams of `key` itself choose and replace tokens.
        state = stream(mix(key), samples.keys[number, 0], samples.keys[number, 1], samples.keys[number, 2])
        left, of_label = uniform(word_at(state, 0)), shares[samples.sequence_labels[number]]
        kind = 0
        while kind < SEQUENCE_TO_SEQUENCE and left >= of_label[kind]:
            left -= of_label[kind]
            kind += 1
        kinds[number] = kind
    return kinds


def one_text(samples: Samples, kinds: NDArray[np.int8]) -> Samples:
    """Make one text of each sample that is read in one direction.

    It is both segments without the separators between them, or the first one if the second is random.
    """
    single = (kinds == LEFT_TO_RIGHT) | (kinds == RIGHT_TO_LEFT)
    owners = np.repeat(np.arange(len(kinds)), samples.lengths)
    places = np.arange(len(owners)) - samples.starts[owners]
    inner = samples.special_mask & (places > 0) & (places < samples.lengths[owners] - 1)
    second = places >= samples.second_starts[owners]
    kept = ~(single[owners] & np.where((samples.sequence_labels == RANDOM)[owners], second, inner))
    lengths = np.bincount(owners[kept], minlength=len(kinds))
    spans = samples.continues_span
    return samples._replace(
        input_ids=samples.input_ids[kept],
        special_mask=samples.special_mask[kept],
        starts=starts_of(lengths),
        second_starts=np.where(single, lengths, samples.second_starts),
        continues_span=spans[kept] if len(spans) else spans,
    )


@compiled
def rank_tokens(starts: Places, second_starts: Places, kinds: NDArray[np.int8]) -> tuple[Ids, Ids]:
    """Return the ranks [t] and token types [t] of samples; `starts` [c + 1] and `second_starts` [c] as in Samples."""
    ranks, types = np.zeros(starts[-1], dtype=np.int32), np.empty(starts[-1], dtype=np.int32)
    for number in range(len(kinds)):
        kind, second = kinds[number], second_starts[number]
        length = starts[number + 1] - starts[number]
        for place in range(length):
            rank = 0
            if kind == LEFT_TO_RIGHT:
                rank = place
            elif kind == RIGHT_TO_LEFT:
                rank = length - 1 - place
            elif kind == SEQUENCE_TO_SEQUENCE:
                rank = max(0, place - second + 1)
            ranks[starts[number] + place] = rank
            types[starts[number] + place] = FIRST_TYPES[kind] + (place >= second)
    return ranks, types
