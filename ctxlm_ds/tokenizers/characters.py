"""ELMo (Peters 2018): words by frequency for the softmax, the characters of each word for the input.

The vocabulary is bilm-tf's (<S> </S> <UNK> first, then words by falling frequency, vocab.txt one a line), the
character table that of its UnicodeCharsVocabulary: the UTF-8 bytes of a word between <bow> and <eow>, padded to 50,
each plus one, so that 0 is free for positions outside the sentence: 262 ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.tokenizers.base import Tokenizer, TokenizerFacts
from ctxlm_ds.tokenizers.training_words import count_words, settings_record

KIND = "characters"
BEGIN, END, UNK = "<S>", "</S>", "<UNK>"
ROLES = {"pad": END, "unk": UNK, "cls": BEGIN, "sep": END}
WORD_RULES = ("punctuation", "whitespace")

WORD_CHARACTERS = 50
BEGIN_SENTENCE_CHARACTER, END_SENTENCE_CHARACTER = 257, 258
BEGIN_WORD_CHARACTER, END_WORD_CHARACTER, PADDING_CHARACTER = 259, 260, 261


@dataclass(frozen=True, slots=True)
class CharacterSettings:
    """Settings of an ELMo vocabulary."""

    vocab_size: int
    min_frequency: int = 1
    """Least number of occurrences of a word."""
    words: str = "punctuation"
    """`punctuation`: each punctuation mark is a word; `whitespace`: for text that is tokenized already."""
    special_tokens: tuple[str, ...] = ()
    """Further special tokens, after <UNK>."""


class CharacterTokenizer(Tokenizer):
    """Word ids like any other tokenizer; characters by `char_ids` and `character_table`."""

    def char_ids(self, words: Sequence[str]) -> NDArray[np.int32]:
        """Return the characters of words, also of those outside the vocabulary: [n, 50], 1 to 261.

        Source: bilm-tf, data.py, UnicodeCharsVocabulary and the `+ 1` of Batcher; allennlp's ELMoCharacterMapper.
        """
        table = np.full((len(words), WORD_CHARACTERS), PADDING_CHARACTER, dtype=np.int32)
        for row, word in zip(table, words, strict=True):
            if word in _SENTENCE_CHARACTERS:
                row[:3] = BEGIN_WORD_CHARACTER, _SENTENCE_CHARACTERS[word], END_WORD_CHARACTER
                continue
            spelled = word.encode("utf-8", "ignore")[: WORD_CHARACTERS - 2]
            row[0] = BEGIN_WORD_CHARACTER
            row[1 : len(spelled) + 1] = np.frombuffer(spelled, dtype=np.uint8).astype(np.int32) + 1
            row[len(spelled) + 1] = END_WORD_CHARACTER
        return table

    @cached_property
    def character_table(self) -> NDArray[np.int32]:
        """Characters of each id, [vocab_size, 50]."""
        return self.char_ids([self.id_to_token(number) for number in range(self.vocab_size)])

    def word_start_mask(self) -> NDArray[np.bool_]:
        return np.ones(self.vocab_size, dtype=np.bool_)


_SENTENCE_CHARACTERS = {BEGIN: BEGIN_SENTENCE_CHARACTER, END: END_SENTENCE_CHARACTER}


def train_characters(texts: Iterable[str], settings: CharacterSettings) -> CharacterTokenizer:
    """Count the words of `texts` (iterated once) and keep the most frequent; ties in code-point order."""
    from tokenizers import AddedToken, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    is_tokenized = settings.words == "whitespace"
    pre_tokenizer = pre_tokenizers.WhitespaceSplit() if is_tokenized else pre_tokenizers.BertPreTokenizer()
    counts = count_words(texts, pre_tokenizer)
    first = [BEGIN, END, UNK, *settings.special_tokens]
    wanted = (word for word, count in counts.items() if count >= settings.min_frequency and word not in first)
    ordered = sorted(wanted, key=lambda word: (-counts[word], word))
    vocab = {word: number for number, word in enumerate(first + ordered[: settings.vocab_size - len(first)])}
    backend = Backend(models.WordLevel(vocab, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizer
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in first])
    return CharacterTokenizer(backend, TokenizerFacts(KIND, dict(ROLES), training=settings_record(settings)))
