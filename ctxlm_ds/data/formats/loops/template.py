"""Special tokens around text: [CLS] A [SEP], [CLS] A [SEP] B [SEP], <s> A </s></s> B </s>.

Token types are 0 up to and including the first separator, 1 after it; a RoBERTa model has no table for them and ignores
them. Not here: framing itself (index/reader.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ctxlm_ds.tokenizers.base import Tokenizer

SINGLE_SPECIALS = 2


class SequenceTemplate(NamedTuple):
    """How a tokenizer's model family frames one text or two."""

    cls_id: int
    sep_id: int
    pad_id: int
    double_separator: bool
    """Two separators between A and B (RoBERTa)."""
    vocab_size: int
    """A token of a dataset that is not below it is damage."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> SequenceTemplate:
        return cls(
            tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id, tokenizer.double_separator, tokenizer.vocab_size
        )

    @property
    def pair_specials(self) -> int:
        """Special tokens in a pair."""
        return 4 if self.double_separator else 3
