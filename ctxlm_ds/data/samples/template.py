"""Special tokens around text: [CLS] A [SEP], [CLS] A [SEP] B [SEP], <s> A </s></s> B </s>.

In: ranges of token ids. Out: Sample. Token types are 0 up to and including the first separator, 1 after it; a RoBERTa
model has no table for them and ignores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.sample import NO_LABEL, Sample

if TYPE_CHECKING:
    from ctxlm_ds.tokenizers.base import Tokenizer

SINGLE_SPECIALS = 2


@dataclass(frozen=True, slots=True)
class SequenceTemplate:
    """How a tokenizer's model family frames one text or two."""

    cls_id: int
    sep_id: int
    pad_id: int
    double_separator: bool
    """Two separators between A and B (RoBERTa)."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> SequenceTemplate:
        return cls(tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id, tokenizer.double_separator)

    @property
    def pair_specials(self) -> int:
        """Special tokens in a pair."""
        return 4 if self.double_separator else 3

    def pair(self, first: NDArray[np.integer], second: NDArray[np.integer], is_random_next: int) -> Sample:
        """A pair of segments; n = len(first) + len(second) + pair_specials."""
        length = len(first) + len(second) + self.pair_specials
        ids = np.full(length, self.sep_id, dtype=np.int64)
        special = np.zeros(length, dtype=np.bool_)
        types = np.zeros(length, dtype=np.int64)
        first_end, second_start = 1 + len(first), length - 1 - len(second)
        ids[0] = self.cls_id
        ids[1:first_end] = first
        ids[second_start:-1] = second
        special[0] = special[-1] = True
        special[first_end:second_start] = True
        types[first_end + 1 :] = 1
        return Sample(ids, types, special, is_random_next)

    def single(self, pieces: Sequence[NDArray[np.integer]]) -> Sample:
        """One text, or consecutive texts with one separator between them (RoBERTa's crossing of documents)."""
        length = sum(map(len, pieces)) + len(pieces) + 1
        ids = np.full(length, self.sep_id, dtype=np.int64)
        special = np.zeros(length, dtype=np.bool_)
        ids[0], special[0], start = self.cls_id, True, 1
        for piece in pieces:
            ids[start : start + len(piece)] = piece
            special[start + len(piece)] = True
            start += len(piece) + 1
        return Sample(ids, np.zeros(length, dtype=np.int64), special, NO_LABEL)
