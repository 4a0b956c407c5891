"""ELMo (Peters 2018): words by frequency for the softmax, the characters of each word for the input.

The vocabulary is bilm-tf's (docs/tokenizers.md), the characters are those of its UnicodeCharsVocabulary: the UTF-8
bytes of a word between <bow> and <eow>, padded to 50, each plus one, so that 0 is free for positions outside the
sentence: 262 ids. Words outside the vocabulary that the input spells have ids behind it (`input_words`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.tokenizers.base import Tokenizer, TokenizerFacts, TokenizerKind, TokenizerType, write_lines
from ctxlm_ds.tokenizers.training_words import count_words, settings_record

BEGIN, END, UNK = "<S>", "</S>", "<UNK>"
ROLES = {"pad": END, "unk": UNK, "cls": BEGIN, "sep": END}

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
    input_words: int | None = None
    """Most words after the vocabulary, which the input spells and which are <UNK> as labels; none by default."""


_SENTENCE_CHARACTERS = {BEGIN: BEGIN_SENTENCE_CHARACTER, END: END_SENTENCE_CHARACTER}


def char_ids(words: Sequence[str], size: int = WORD_CHARACTERS) -> NDArray[np.int32]:
    """Return the characters of words, also of those outside the vocabulary: [n, size], 1 to 261.

    Source: bilm-tf, data.py, UnicodeCharsVocabulary and the `+ 1` of Batcher; allennlp's ELMoCharacterMapper.
    """
    spelled = [word.encode("utf-8", "ignore")[: size - 2] for word in words]
    lengths = np.array([len(text) for text in spelled], dtype=np.int64)
    rows = np.repeat(np.arange(len(words)), lengths)
    columns = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + 1
    table = np.full((len(words), size), PADDING_CHARACTER, dtype=np.int32)
    table[rows, columns] = np.frombuffer(b"".join(spelled), dtype=np.uint8).astype(np.int32) + 1
    table[:, 0] = BEGIN_WORD_CHARACTER
    table[np.arange(len(words)), lengths + 1] = END_WORD_CHARACTER
    for number, word in enumerate(words):
        if word in _SENTENCE_CHARACTERS:
            table[number] = PADDING_CHARACTER
            table[number, :3] = BEGIN_WORD_CHARACTER, _SENTENCE_CHARACTERS[word], END_WORD_CHARACTER
    return table


class CharacterTokenizer(Tokenizer):
    """Word ids like any other tokenizer; characters by `char_ids`."""

    kind = "characters"
    char_ids = staticmethod(char_ids)

    @property
    def output_size(self) -> int:
        return min(self.vocab_size, int(self.facts.training.get("requested_vocab_size", self.vocab_size)))

    @property
    def words(self) -> list[str]:
        """Words in the order of their ids."""
        return [self.id_to_token(number) for number in range(self.vocab_size)]

    def word_start_mask(self) -> NDArray[np.bool_]:
        return np.ones(self.vocab_size, dtype=np.bool_)

    def write_vocabulary(self, folder: Path, model: dict[str, Any]) -> None:
        write_lines(folder / "vocab.txt", sorted(model["vocab"], key=model["vocab"].get)[: self.output_size])


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
    most = settings.vocab_size - len(first) + (settings.input_words or 0)
    vocab = {word: number for number, word in enumerate(first + ordered[:most])}
    backend = Backend(models.WordLevel(vocab, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizer
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in first])
    return CharacterTokenizer(backend, TokenizerFacts(dict(ROLES), training=settings_record(settings)))


CHARACTERS = TokenizerKind(
    CharacterTokenizer,
    lambda content, training: training.get("kind") == CharacterTokenizer.kind,
    types={
        "elmo": TokenizerType(
            train_characters, CharacterSettings, 793_471, 3 + 1, choices={"words": ("punctuation", "whitespace")},
            against_unknown="raise --vocab-size or lower --min-frequency, so that more words have an id",
        )
    },
)  # fmt: skip
