"""Tokens per word of held-out text, for a perplexity per word.

Words are counted from tokens, for vocabularies whose tokens keep the text's spaces. A word is a longest run of
characters other than ASCII white space, as `str.split` finds words in English text. Special tokens are no text, and end
a word. WordPiece and GPT-1's BPE drop spaces, so the words of their texts are not known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from ctxlm_ds.objectives.base import LossTerm

SPACES = (*range(0x9, 0xE), 0x20)
"""ASCII white space."""
_BYTE_LEVEL = str.maketrans({chr(0x100 + byte): " " for byte in SPACES})
"""Byte-level BPE writes the bytes up to the space as the characters from U+0100."""
_PIECES = str.maketrans({"▁": " "} | {chr(byte): " " for byte in SPACES})
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class WordCounts:
    """What each token of a vocabulary says about words, [vocab_size] each."""

    inside: NDArray[np.int64]
    """Words that begin after a space of the token."""
    begins: NDArray[np.bool_]
    """True if the first character begins a word if a space is before the token."""
    ends_in_space: NDArray[np.bool_]
    """True if a word may begin with the next token."""

    def count(self, previous: NDArray[np.int64], tokens: NDArray[np.int64]) -> int:
        """Return how many words begin in `tokens` [k], which follow `previous` [k]."""
        return int((self.inside[tokens] + (self.begins[tokens] & self.ends_in_space[previous])).sum())


def word_counts(tokenizer: Tokenizer) -> WordCounts | None:
    """Return the table of a vocabulary; None if its tokens do not keep spaces."""
    decoder = json.dumps(tokenizer.content.get("decoder"), ensure_ascii=False)
    if '"ByteLevel"' in decoder:
        spaces = _BYTE_LEVEL
    elif "▁" in decoder:
        spaces = _PIECES
    else:
        return None
    size = tokenizer.vocab_size
    inside, begins = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.bool_)
    ends_in_space = np.ones(size, dtype=np.bool_)
    for token, number in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        byte = _BYTE_PIECE.fullmatch(token) if spaces is _PIECES else None
        text = chr(int(byte[1], 16)) if byte else token
        text = text.translate(spaces)
        if number in tokenizer.special_ids or not text:
            continue
        inside[number] = len(re.findall(r" [^ ]", text))
        begins[number] = text[0] != " "
        ends_in_space[number] = text[-1] == " "
    return WordCounts(inside, begins, ends_in_space)


def tokens_per_word(batches: Iterable[Batch], term: LossTerm, counts: WordCounts) -> float | None:
    """Return predicted tokens per word that begins among them; None without a word. `term` predicts next tokens."""
    tokens = words = 0
    for batch in batches:
        labels, inputs = (batch.fields[name].numpy() for name in (term.labels[0], "input_ids"))
        predicted = labels != IGNORE_LABEL
        tokens += int(predicted.sum())
        words += counts.count(inputs[predicted], labels[predicted])
    return tokens / words if words else None
