"""Scores of sentences under a language model of transformers, by a named definition.

Shape letters: s positions, n scored tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from ctxlm_ds.apps.downstream.language_model import LanguageModel, Row, Tokens, Values
from ctxlm_ds.apps.downstream.prompting import FIRST_SENTINEL
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.problems import show_value

DEFINITIONS = {
    "babylm": "sum over all tokens but the special ones (babylm-org/babylm-eval, sentence_zero_shot)",
    "lm-eval": "sum over the tokens of a space and the text, after the beginning or end token (lm-evaluation-harness)",
    "minicons": "mean over all tokens but the special ones; of a causal model over all but the first (minicons)",
    "word-l2r": "as babylm, with masks also for the later tokens of the word (Kauf and Ivanova 2023)",
}
"""What a score sums, by definition; scores of different definitions are never compared."""
MEANS = frozenset({"minicons"})
LEFT_TO_RIGHT, PSEUDO = "left-to-right", "pseudo-likelihood"
BLOCK = 1024
"""Sentences among which identical inputs are found."""
MOST_SPECIAL = 4
"""Tokens that a sentence has without a character of it."""
Span = tuple[int, int]
"""The first character of a token in its sentence, and the one behind its last."""


class TokenScores(NamedTuple):
    """The values of a sentence's scored tokens."""

    values: Values
    """Nats, float64 [n]."""
    spans: list[Span]


class Encoded(NamedTuple):
    """A sentence with its special tokens."""

    ids: Tokens
    spans: list[Span]
    words: list[int | None]
    """The number of each token's word."""

    @property
    def places(self) -> list[int]:
        """Return the positions of all but the special tokens, which are no characters of the sentence."""
        return [at for at, (_, end) in enumerate(self.spans) if end > 0]

    def masked(self, places: Iterable[int], mask: int) -> Tokens:
        """Return the ids with a mask at some places."""
        ids = list(self.ids)
        for at in places:
            ids[at] = mask
        return tuple(ids)


Scored = tuple[Row, list[int]]
"""An input of the model, and the places in the sentence of the tokens that it scores."""


class SentenceScorer(ABC):
    """A model that scores sentences."""

    ways: ClassVar[tuple[str, ...]]
    """What the model can sum, the default first."""
    definitions: ClassVar[tuple[str, ...]] = ("babylm",)
    definition: str
    way: str

    @abstractmethod
    def block(self, sentences: Sequence[str]) -> Iterable[TokenScores]:
        """Return the values of the tokens of some sentences, which are computed together."""

    def tokens(self, sentences: Sequence[str]) -> Iterator[TokenScores]:
        """Yield the values of each sentence's tokens, in order; DataError for one that the model cannot read."""
        for start in range(0, len(sentences), BLOCK):
            yield from self.block(sentences[start : start + BLOCK])

    def score_each(self, sentences: Sequence[str]) -> Iterator[float]:
        """Yield the score of each sentence in nats, in order; 0 if none of its tokens is scored."""
        means = self.definition in MEANS
        for one in self.tokens(sentences):
            yield float(sum(one.values) / (max(len(one.values), 1) if means else 1))

    def scores(self, sentences: Sequence[str]) -> Values:
        """Return the scores of `score_each`, float64 [sentences]."""
        return np.array(list(self.score_each(sentences)))


@dataclass
class TransformersScorer(SentenceScorer):
    """A language model of transformers."""

    auto_class: ClassVar[Any]
    model_class: ClassVar[type[LanguageModel]] = LanguageModel
    model: LanguageModel
    tokenizer: Any
    longest: int
    """Most positions that the model reads."""
    definition: str
    way: str

    @abstractmethod
    def rows(self, sentence: Encoded) -> list[Scored]:
        """Return the inputs that score a sentence."""

    def encode(self, sentence: str, special: bool = True) -> Encoded:
        """Tokenize a sentence."""
        found = self.tokenizer(sentence, add_special_tokens=special, return_offsets_mapping=True)
        return Encoded(tuple(found["input_ids"]), found["offset_mapping"], found.word_ids())

    def tokens(self, sentences: Sequence[str]) -> Iterator[TokenScores]:
        """Yield the values of each sentence's tokens; one that is too long is refused before any is computed."""
        for text in sentences:
            if len(text.encode()) + MOST_SPECIAL > self.longest:  # a token has a byte at least
                self._encode_rows(text)
        return super().tokens(sentences)

    def _encode_rows(self, text: str) -> tuple[Encoded, list[Scored]]:
        encoded = self.encode(text)
        rows = self.rows(encoded)
        length = max((row.length for row, _ in rows), default=0)
        if length > self.longest:
            raise DataError(f"{show_value(text)} has {length} tokens, the model reads at most {self.longest}; "
                            "shorten it or leave it out")  # fmt: skip
        return encoded, rows

    def block(self, sentences: Sequence[str]) -> Iterable[TokenScores]:
        encoded, rows = zip(*map(self._encode_rows, sentences), strict=True)
        values = iter(self.model.log_probs([row for several in rows for row, _ in several]))
        for sentence, several in zip(encoded, rows, strict=True):
            spans = [sentence.spans[at] for _, places in several for at in places]
            yield TokenScores(np.concatenate([np.empty(0), *(next(values) for _ in several)]), spans)


class MaskedSentences(TransformersScorer):
    """A masked language model: each token is masked alone (Salazar 2020), or with the rest of its word."""

    ways: ClassVar[tuple[str, ...]] = (PSEUDO,)
    definitions: ClassVar[tuple[str, ...]] = ("babylm", "minicons", "word-l2r")
    auto_class = AutoModelForMaskedLM

    def rows(self, sentence: Encoded) -> list[Scored]:
        inputs = [sentence.masked(self._hidden(sentence, at), self.tokenizer.mask_token_id) for at in sentence.places]
        places = zip(inputs, sentence.places, strict=True)
        return [(Row(ids, (), (at,), (sentence.ids[at],)), [at]) for ids, at in places]

    def _hidden(self, sentence: Encoded, target: int) -> list[int]:
        word = sentence.words[target]
        if self.definition != "word-l2r" or word is None:
            return [target]
        return [at for at in sentence.places if at >= target and sentence.words[at] == word]


class CausalSentences(TransformersScorer):
    """A causal model: each token after those before it; a token that nothing is before is not scored."""

    ways, definitions, auto_class = (LEFT_TO_RIGHT,), ("babylm", "lm-eval", "minicons"), AutoModelForCausalLM

    def encode(self, sentence: str, special: bool = True) -> Encoded:
        if self.definition != "lm-eval":
            return super().encode(sentence, special)
        begin, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        first = end if begin is None else begin
        ids, spans, words = super().encode(f" {sentence}", special=False)
        spans = [(max(start - 1, 0), max(stop - 1, 1)) for start, stop in spans]
        if first is None or ids[:1] == (first,):
            return Encoded(ids, spans, words)
        return Encoded((first, *ids), [(0, 0), *spans], [None, *words])

    def rows(self, sentence: Encoded) -> list[Scored]:
        places = range(len(sentence.ids)) if self.definition in MEANS else sentence.places
        scored = [at for at in places if at > 0]
        if not scored:
            return []
        targets = tuple(sentence.ids[at] for at in scored)
        return [(Row(sentence.ids[: scored[-1]], (), tuple(at - 1 for at in scored), targets), scored)]


class EncoderDecoderSentences(TransformersScorer):
    """An encoder-decoder; a sentinel, if the tokenizer has one, is its mask.

    `mask`: the encoder holds one mask, and the decoder predicts the token behind its beginning and the mask (a T5's
    behind the sentinel), as babylm-eval. `prefix`: the encoder holds only the mask, the decoder the sentence. `infill`:
    as `mask`, but the decoder reads what it reads in pretraining (a BART's the tokens before, a T5's its start and the
    sentinel).
    """

    ways, auto_class = ("mask", "prefix", "infill"), AutoModelForSeq2SeqLM

    def encode(self, sentence: str, special: bool = True) -> Encoded:
        return super().encode(sentence, special and self.way != "prefix")

    def rows(self, sentence: Encoded) -> list[Scored]:
        tokenizer, ids = self.tokenizer, sentence.ids
        sentinel = tokenizer.get_vocab().get(FIRST_SENTINEL)
        mask = tokenizer.mask_token_id if sentinel is None else sentinel
        begin = [token for token in (tokenizer.bos_token_id,) if token is not None]
        if self.way == "prefix":
            given = [token for token in (tokenizer.cls_token_id, mask, tokenizer.eos_token_id) if token is not None]
            read, places = (*(begin or [mask]), mask, *ids[:-1]), range(len(ids))
            return [(Row(tuple(given), read, tuple(at + 1 for at in places), ids), list(places))] if ids else []
        rows: list[Scored] = []
        for at in sentence.places:
            read = (*begin, mask)
            if self.way == "infill":
                labels, place = (ids, at) if sentinel is None else ((mask, ids[at]), 1)
                read = self.model.decoder_ids(labels)[: place + 1]
            rows.append((Row(sentence.masked([at], mask), read, (len(read) - 1,), (ids[at],)), [at]))
        return rows
