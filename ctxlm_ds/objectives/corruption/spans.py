"""Choosing runs of words to predict: SpanBERT's spans, ALBERT's n-grams, UniLM's and MASS's blocks, compiled.

The first three take the candidates of a sample in their order (tokens, or words with `whole_word`), mark positions in
`scratch.chosen` and stop at `wanted` tokens. Draw j of a sample is word 1 + 2j of its stream: the upper half draws the
place, the lower half the length. Sources: facebookresearch/SpanBERT fairseq/data/masking.py
(PairWithSpanMaskingScheme), google-research/albert create_pretraining_data.py (create_masked_lm_predictions),
microsoft/unilm unilm-v1 loader_utils.py (get_masked_pos).

`mask_spans` masks one span in each block of a text, for all samples of a micro-batch. Its first token is never masked,
so every masked one has a token before it, which the decoder reads. Word 3p of position p draws the begin of the span of
a block that begins there, word 3p + 1 what replaces the token at p, word 3p + 2 the random token. Source:
microsoft/MASS MASS-summarization/mass/masked_dataset.py (`MaskedLanguagePairDataset`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ctxlm_ds.data.numba_random import below, compiled, inlined, put, stream, uniform, word_at
from ctxlm_ds.data.sample import Ids, Marks, Places, Samples, Shares

LOW_HALF = np.uint64((1 << 32) - 1)
HALF_SCALE = 2.0**-32


class Scratch(NamedTuple):
    """Work space of one sample; `begins` and `ends` are its candidates for prediction."""

    tokens: Ids
    """Of the sample."""
    begins: Places
    ends: Places
    order: Places
    """Candidates in the order in which they are tried, or the candidate of each position."""
    chosen: Marks


def geometric_shares(p: float, longest: int) -> Shares:
    """Return the shares of lengths 1 to `longest`: p(1 - p)^(n - 1), renormalised (Joshi 2020, section 3.1)."""
    shares = p * (1.0 - p) ** np.arange(longest)
    return np.asarray(shares / shares.sum(), dtype=np.float64)


def ngram_shares(longest: int) -> Shares:
    """Return the shares of n-grams of 1 to `longest` words: proportional to 1/n (Lan 2020, section 4.1)."""
    shares = 1.0 / np.arange(1, longest + 1)
    return np.asarray(shares / shares.sum(), dtype=np.float64)


def skipgram_shares(p: float, longest: int) -> Shares:
    """Return the shares of single words and of runs of 2 to `longest`, together p (Dong 2019, section 2.4)."""
    if longest == 1:
        return np.ones(1)
    return np.append(1.0 - p, np.full(longest - 1, p / (longest - 1)))


@inlined
def draw_length(word: np.uint64, shares: Shares, longest: int) -> np.int64:
    """Draw a length from 1 to `longest` by its share of the shares of these lengths."""
    left = np.float64(word & LOW_HALF) * HALF_SCALE * shares[:longest].sum()
    length = 1
    while length < longest and left >= shares[length - 1]:
        left -= shares[length - 1]
        length += 1
    return np.int64(length)


@compiled
def choose_spans(candidates: int, wanted: int, state: np.uint64, shares: Shares, scratch: Scratch) -> None:
    """Mark spans of candidates until `wanted` tokens are marked, the last one cut there (SpanBERT).

    The anchor is uniform over the candidates' tokens and drawn again if it is marked. Its span begins with the
    candidate that holds it and has as many as the drawn length, fewer if the text ends or a special token follows.
    """
    of_position, chosen = scratch.order, scratch.chosen
    of_position[:] = -1
    available = 0
    for number in range(candidates):
        of_position[scratch.begins[number] : scratch.ends[number]] = number
        available += scratch.ends[number] - scratch.begins[number]
    first, after = scratch.begins[0], scratch.ends[candidates - 1]
    room, draw = min(wanted, available), 0
    while room > 0:
        word = word_at(state, 1 + 2 * draw)
        draw += 1
        anchor = first + below(word, after - first)
        number = of_position[anchor]
        if number < 0 or chosen[anchor]:
            continue
        last = number + draw_length(word, shares, len(shares))
        position = scratch.begins[number]
        while room > 0 and number < last and number < candidates and scratch.begins[number] == position:
            while room > 0 and position < scratch.ends[number]:
                room -= not chosen[position]
                chosen[position] = True
                position += 1
            number += 1


@compiled
def choose_ngrams(candidates: int, wanted: int, state: np.uint64, shares: Shares, scratch: Scratch) -> None:
    """Mark n-grams in random order of their first candidates (ALBERT).

    An n-gram that exceeds `wanted` is shortened until it fits or left out, and one that overlaps a marked one is left
    out, so that fewer tokens may be marked. N-grams continue over special tokens between them. If none fits, part of
    the first candidate is marked.
    """
    order, chosen = scratch.order, scratch.chosen
    for number in range(candidates):
        order[number] = number
    room = wanted
    for turn in range(candidates):
        word = word_at(state, 1 + 2 * turn)
        drawn = turn + below(word, candidates - turn)
        number, order[drawn] = order[drawn], order[turn]
        order[turn] = number
        length = draw_length(word, shares, min(len(shares), candidates - number))
        while length > 0 and tokens_in(scratch, number, length) > room:
            length -= 1
        if length > 0 and not overlaps(scratch, number, length):
            for member in range(number, number + length):
                chosen[scratch.begins[member] : scratch.ends[member]] = True
            room -= tokens_in(scratch, number, length)
            if room == 0:
                break
    if room == wanted and candidates > 0:
        chosen[scratch.begins[order[0]] : scratch.begins[order[0]] + wanted] = True


@compiled
def choose_skipgrams(candidates: int, wanted: int, state: np.uint64, shares: Shares, scratch: Scratch) -> None:
    """Mark candidates in random order, some with those after them, until `wanted` tokens are marked (UniLM).

    A candidate that is marked or does not fit is left out. The run that it begins ends before a special token, and
    before one with which it would exceed `wanted` if none of its tokens were marked. If none fits, part of the first
    candidate is marked.
    """
    order, chosen = scratch.order, scratch.chosen
    for number in range(candidates):
        order[number] = number
    marked = 0
    for turn in range(candidates):
        word = word_at(state, 1 + 2 * turn)
        drawn = turn + below(word, candidates - turn)
        number, order[drawn] = order[drawn], order[turn]
        order[turn] = number
        first, end = scratch.begins[number], scratch.ends[number]
        if marked + end - first > wanted or chosen[first:end].any():
            continue
        after = min(number + draw_length(word, shares, len(shares)), candidates)
        for member in range(number + 1, after):
            if scratch.begins[member] != end or marked + scratch.ends[member] - first > wanted:
                break
            end = scratch.ends[member]
        for position in range(first, end):
            marked += not chosen[position]
            chosen[position] = True
        if marked == wanted:
            break
    if marked == 0 and candidates > 0:
        chosen[scratch.begins[order[0]] : scratch.begins[order[0]] + wanted] = True


@compiled
def tokens_in(scratch: Scratch, number: int, length: int) -> np.int64:
    """Return how many tokens `length` candidates from `number` have."""
    count = np.int64(0)
    for member in range(number, number + length):
        count += scratch.ends[member] - scratch.begins[member]
    return count


@compiled
def overlaps(scratch: Scratch, number: int, length: int) -> bool:
    """Return True if any token of `length` candidates from `number` is marked."""
    for member in range(number, number + length):
        if scratch.chosen[scratch.begins[member] : scratch.ends[member]].any():
            return True
    return False


class SpanRules(NamedTuple):
    """The rules of an objective."""

    share: float
    """Share of a block that is masked, rounded down, at least one token."""
    block_size: int
    keep_prob: float
    random_prob: float
    mask_id: int
    random_ids: Ids
    """Tokens to draw from."""


@compiled
def span_size(length: int, share: float) -> int:
    """Return the masked tokens of a block of `length` tokens, at least 1."""
    return max(1, int(length * share))


@compiled
def mask_spans(samples: Samples, key: np.uint64, rules: SpanRules, input_ids: Ids, masked: Marks) -> None:
    """Write the inputs [t] of samples of t tokens, and True in `masked` [t] at masked tokens."""
    masked[:] = False
    put(input_ids, samples.input_ids)
    for number in range(len(samples.keys)):
        state = stream(key, samples.keys[number, 0], samples.keys[number, 1], samples.keys[number, 2])
        first, length = samples.starts[number], samples.starts[number + 1] - samples.starts[number]
        for block in range(1, length, rules.block_size):
            size = min(rules.block_size, length - block)
            count = span_size(size, rules.share)
            begin = block + below(word_at(state, 3 * block), size - count + 1)
            masked[first + begin : first + begin + count] = True
            for position in range(begin, begin + count):
                draw = uniform(word_at(state, 3 * position + 1))
                if draw < rules.keep_prob:
                    continue
                token = rules.mask_id
                if draw < rules.keep_prob + rules.random_prob:
                    token = rules.random_ids[below(word_at(state, 3 * position + 2), len(rules.random_ids))]
                input_ids[first + position] = token
