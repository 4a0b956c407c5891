"""The merges of WordPiece by likelihood, exact at each step: the best pair of all is n_ab / (n_a n_b).

In: the different words with their counts. Out: the tokens in order. A merge changes the scores of every pair that
shares a symbol with it, so each step looks at all pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

MARK = "##"
_FIRST_CAPACITY = 1 << 16


class _Pairs:
    """Counts of neighbouring symbols, and the words that contain them."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int], int] = {}
        self._words: list[set[int]] = []
        self._table = np.zeros((_FIRST_CAPACITY, 3), dtype=np.int64)
        """[slots] of left symbol, right symbol, count."""

    def change(self, symbols: Sequence[int], count: int, word: int) -> None:
        """Add `count` to every pair of a word."""
        for pair in zip(symbols, symbols[1:], strict=False):
            slot = self._slots.setdefault(pair, len(self._words))
            if slot == len(self._words):
                self._words.append(set())
                if slot == len(self._table):
                    self._table = np.concatenate((self._table, np.zeros_like(self._table)))
                self._table[slot, :2] = pair
            self._table[slot, 2] += count
            if count > 0:
                self._words[slot].add(word)

    def take_best(self, occurrences: NDArray[np.int64], min_frequency: int) -> tuple[tuple[int, int], set[int]] | None:
        """Return the pair with the best score and the words that contain it, or did; None if all pairs are rarer."""
        slot = _best_slot(self._table[: len(self._words)], occurrences, max(1, min_frequency))
        if slot < 0:
            return None
        words, self._words[slot] = self._words[slot], set()
        return (int(self._table[slot, 0]), int(self._table[slot, 1])), words


_compiled: Any = numba.njit(cache=True, nogil=True, error_model="numpy")


@_compiled
def _best_slot(table: NDArray[np.int64], occurrences: NDArray[np.int64], min_frequency: int) -> int:
    """Return the slot of the best pair. Ties go to the greater count, then to the lower numbers."""
    best, best_score = -1, -1.0
    for slot in range(len(table)):
        left, right, count = table[slot]
        if count < min_frequency:
            continue
        score = count / (float(occurrences[left]) * float(occurrences[right]))
        if score < best_score:
            continue
        if score == best_score and (-count, left, right) > (-table[best, 2], table[best, 0], table[best, 1]):
            continue
        best, best_score = slot, score
    return best


def learn_merges(word_counts: dict[str, int], first: Sequence[str], vocab_size: int, min_frequency: int) -> list[str]:
    """Return all tokens: `first`, then those of the merges in order, up to `vocab_size`.

    Two pairs with the same spelling have one token.

    Args:
        word_counts: occurrences of each word.
        first: the first tokens, with every character of the words alone and after the mark of continuations.
        vocab_size: the largest number of tokens.
        min_frequency: the least occurrences of a pair to be merged.
    """
    names = list(first)
    numbers = {name: number for number, name in enumerate(names)}
    counts = list(word_counts.values())
    symbols = [
        [numbers[MARK * (place > 0) + character] for place, character in enumerate(word)] for word in word_counts
    ]
    occurrences = np.zeros(max(len(names), vocab_size), dtype=np.int64)
    pairs = _Pairs()
    for word, count in enumerate(counts):
        np.add.at(occurrences, symbols[word], count)
        pairs.change(symbols[word], count, word)
    while len(names) < vocab_size and (found := pairs.take_best(occurrences, min_frequency)) is not None:
        best, words = found
        name = names[best[0]] + names[best[1]].removeprefix(MARK)
        number = numbers.setdefault(name, len(names))
        names += [name] if number == len(names) else []
        for word in words:
            before, after = symbols[word], _merged(symbols[word], best, number)
            if len(after) < len(before):
                pairs.change(before, -counts[word], word)
                pairs.change(after, counts[word], word)
                num_merged = (len(before) - len(after)) * counts[word]
                occurrences[best[0]] -= num_merged
                occurrences[best[1]] -= num_merged
                occurrences[number] += num_merged
                symbols[word] = after
    return names


def _merged(symbols: Sequence[int], pair: tuple[int, int], number: int) -> list[int]:
    merged: list[int] = []
    place = 0
    while place < len(symbols):
        is_pair = tuple(symbols[place : place + 2]) == pair
        merged.append(number if is_pair else symbols[place])
        place += 2 if is_pair else 1
    return merged
