"""fairseq's rules of BART's noise (data/denoising_dataset.py), written down as slow loops over lists of words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np

from ctxlm_ds.data.numba_random import word_at
from ctxlm_ds.objectives.corruption.infilling import (
    MASK_PLACES,
    PLACES,
    PURPOSES,
    ROTATION,
    SENTENCE_ORDER,
    SENTENCES,
    SHIFT,
    SPAN_KINDS,
    SPAN_LENGTHS,
    SPAN_STARTS,
    TOKENS,
    InfillingRules,
)

MASK_TOKENS, PLACE_TOKENS = MASK_PLACES + 1, PLACES + 1


class StreamDraws:
    """The draws of a sample's stream, by purpose."""

    def __init__(self, state: np.uint64, tokens: Sequence[int]) -> None:
        self._state, self._tokens = state, tokens

    def uniform(self, purpose: int) -> Iterator[float]:
        return ((self._word(purpose, number) >> 11) / 2**53 for number in count())

    def below(self, purpose: int, bound: int, number: int = 0) -> int:
        return self._word(purpose, number) // 2**32 * bound // 2**32

    def token(self, purpose: int, number: int) -> int:
        """A random token."""
        return self._tokens[self.below(purpose, len(self._tokens), number)]

    def different(self, purpose: int, among: int, number: int) -> list[int]:
        """`randperm(among)[:number]`."""
        left, chosen = list(range(among)), []
        for turn in range(number):
            place = turn + self.below(purpose, among - turn, turn)
            left[turn], left[place] = left[place], left[turn]
            chosen.append(left[turn])
        return chosen

    def _word(self, purpose: int, number: int) -> int:
        return int(np.uint64(word_at(self._state, purpose + PURPOSES * number)))


def sentences_of(text: Sequence[int], end: int) -> list[list[int]]:
    """The places of each sentence; those that are left over are a further list."""
    is_end = [token == end for token in text[:-1]] + [True]
    cuts = [place + 1 for place in range(len(text)) if is_end[place] and not (place and is_end[place - 1])]
    bounds = [0, *cuts, len(text)]
    return [list(range(first, after)) for first, after in zip(bounds, bounds[1:], strict=False)]


def permuted(text: Sequence[int], rules: InfillingRules, draws: StreamDraws) -> list[int]:
    """The places of the text after sentences have changed theirs."""
    *sentences, rest = sentences_of(text, rules.sentence_end)
    moved = math.ceil(len(sentences) * rules.permute_ratio)
    homes = draws.different(SENTENCES, len(sentences), moved)
    order = dict(zip(homes, (homes[turn] for turn in draws.different(SENTENCE_ORDER, moved, moved)), strict=True))
    found = [place for number in range(len(sentences)) for place in sentences[order.get(number, number)]]
    return found + rest


def span_lengths(budget: int, rules: InfillingRules, draws: StreamDraws) -> list[int]:
    """Lengths until their sum is the budget."""
    if not len(rules.length_ends):
        return [1] * budget
    lengths: list[int] = []
    for share in draws.uniform(SPAN_LENGTHS):
        if sum(lengths) >= budget:
            break
        lengths.append(int((np.asarray(rules.length_ends[:-1]) <= share).sum()))
    return [*lengths[:-1], budget - sum(lengths[:-1])]


def infilled(places: list[int], text: Sequence[int], begins: set[int], rules: InfillingRules, draws: StreamDraws
             ) -> tuple[list[int], int, set[int]]:  # fmt: skip
    """The text with its spans replaced, the spans of no word, and the places of replaced tokens."""
    words: list[list[tuple[int, int]]] = []
    for turn, place in enumerate(places):
        if place in begins or not words:
            words.append([])
        words[-1].append((turn, place))
    lengths = span_lengths(math.ceil(np.float32(len(words)) * np.float32(rules.mask_ratio)), rules, draws)
    kept = [length for length in lengths if length]
    spans = dict(zip(draws.different(SPAN_STARTS, len(words), len(kept)), kept, strict=True))
    kinds = dict(zip(spans, (share < rules.random_ratio for share in draws.uniform(SPAN_KINDS)), strict=False))
    written, replaced = [], set()
    for number, word in enumerate(words):
        covering = [first for first, length in spans.items() if first <= number < first + length]
        if not covering:
            written += [text[place] for _, place in word]
            continue
        replaced |= {place for _, place in word}
        owner = min(covering)
        masks = word if rules.replace_length == -1 else word[: rules.replace_length] if owner == number else []
        written += [draws.token(TOKENS, turn) if kinds[owner] else rules.mask_id for turn, _ in masks]
    return written, len(lengths) - len(kept), replaced


def inserted(text: list[int], number: int, purpose: int, rules: InfillingRules, draws: StreamDraws) -> list[int]:
    places = draws.different(purpose, len(text) + number, number)
    random = math.ceil(number * rules.random_ratio)
    new = {p: draws.token(purpose + 1, turn) if turn < random else rules.mask_id for turn, p in enumerate(places)}
    left = iter(text)
    return [new[place] if place in new else next(left) for place in range(len(text) + number)]


def by_rule(text: list[int], begins: set[int], rules: InfillingRules, draws: StreamDraws) -> tuple[list[int], set[int]]:
    """The input without its frame, and the places of tokens that it lacks."""
    places, replaced = list(range(len(text))), set[int]()
    if rules.permute_ratio:
        places = permuted(text, rules, draws)
    result = [text[place] for place in places]
    if rules.mask_ratio:
        result, masks, replaced = infilled(places, text, begins, rules, draws)
        result = inserted(result, masks, MASK_PLACES, rules, draws)
    if rules.insert_ratio:
        result = inserted(result, math.ceil((len(result) + 2) * rules.insert_ratio), PLACES, rules, draws)
    if rules.rotate_prob and next(draws.uniform(ROTATION)) < rules.rotate_prob:
        shift = draws.below(SHIFT, len(result) + 1)
        result = result[shift:] + result[:shift]
    return result, replaced
