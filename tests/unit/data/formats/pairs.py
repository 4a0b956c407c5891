"""Pairs as the compiled code draws them, for tests, and its draws for a transcription that draws one by one."""

from __future__ import annotations

import numpy as np

from ctxlm_ds.data.formats.loops.pairs import COINS, PairSettings, make_pairs
from ctxlm_ds.data.index.sentence_table import SentenceTable
from ctxlm_ds.data.numba_random import below, stream, stream_key, uniform, word_at
from ctxlm_ds.registry import FORMATS, load_object

Record = tuple[int, int, int, int, int, int]
SPECIALS = 3


def pairs_of(
    table: SentenceTable, sample_format: str, room: int, short_seq_prob: float, seed: int, duplicate: int
) -> list[Record]:
    """All pairs of one pass."""
    entry, key = FORMATS.get(sample_format), stream_key(seed, sample_format)
    settings = PairSettings(room, SPECIALS, short_seq_prob, key, duplicate, exchanges=entry.exchanges)
    records: list[Record] = make_pairs(load_object(entry.chooser), table, settings, (0, table.num_documents)).tolist()
    return records


class KernelDraws:
    """The words of one stream, one draw after another as `random.Random` gives them."""

    def __init__(self, seed: int, sample_format: str, duplicate: int, second: int, third: int = 0) -> None:
        self._state = np.uint64(stream(stream_key(seed, sample_format), duplicate, second, third))
        self._drawn = 0

    def _next_word(self) -> np.uint64:
        self._drawn += 1
        return np.uint64(word_at(self._state, self._drawn - 1))

    def random(self) -> float:
        return float(uniform(self._next_word()))

    def randint(self, low: int, high: int) -> int:
        """Both ends included."""
        return low + int(below(self._next_word(), high - low + 1))


class KernelCoins(KernelDraws):
    """The coins of shortening the pair whose A begins with a sentence of a document: a bit of a word each."""

    def __init__(self, seed: int, sample_format: str, duplicate: int, document_first: int, sentence: int) -> None:
        super().__init__(seed, sample_format, duplicate, document_first + sentence, COINS)
        self._bits: list[int] = []

    def random(self) -> float:
        if not self._bits:
            self._bits = [int(bit) for bit in f"{int(self._next_word()):064b}"]
        return 0.0 if self._bits.pop() else 0.5
