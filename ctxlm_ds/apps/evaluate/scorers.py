"""Scores of sentences under a model by a named definition, and what opens a model folder as their scorer.

Shape letters: b rows, s positions, n scored tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from ctxlm_ds.apps.downstream import language_model
from ctxlm_ds.apps.downstream.language_model import BATCH_TOKENS, LanguageModel, Row, Tokens, Values, load_model
from ctxlm_ds.apps.downstream.prepare import load_tokenizer, longest_input, read_config
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.export.base import WordLayers, own_format_in
from ctxlm_ds.families.bert.config import UNILM_TOKEN_TYPES
from ctxlm_ds.recipe.problems import show_value

MEANS = frozenset({"minicons"})
LEFT_TO_RIGHT, PSEUDO = "left-to-right", "pseudo-likelihood"
BLOCK = 1024
"""Sentences among which identical inputs are found."""
MOST_SPECIAL = 4
"""Tokens that a sentence has without a character of it."""
Span = tuple[int, int]
"""The first character of a token in its sentence, and the one behind its last."""
DIRECTED_TYPE, CLS_TYPE = 2, 2
"""Token types of UniLM's left-to-right texts (objectives/corruption/kinds.py), and of XLNet's last token."""
WARM_UP = (
    "The town stands on the left bank of the river .", "She has worked there since the end of the war .",
    "In the same year he was elected a member of the council , and two years later he became its head .",
)  # fmt: skip


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
        sentinel = tokenizer.get_vocab().get(language_model.FIRST_SENTINEL)
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


class UnilmModel(LanguageModel):
    pads = False

    def inputs(self, batch: Sequence[Row]) -> dict[str, torch.Tensor]:
        inputs = super().inputs(batch)
        if self.way == PSEUDO:
            return inputs
        rows, length = inputs["input_ids"].shape
        seen = torch.ones(length, length, dtype=torch.bool).tril().expand(rows, 1, length, length)
        return inputs | {"attention_mask": seen, "token_type_ids": torch.full((rows, length), DIRECTED_TYPE)}


class UnilmSentences(MaskedSentences):
    """A UniLM: each token masked alone, seen from both sides, or from the left only."""

    ways, definitions, model_class = (PSEUDO, LEFT_TO_RIGHT), ("babylm",), UnilmModel

    def rows(self, sentence: Encoded) -> list[Scored]:
        rows = super().rows(sentence)
        if self.way == PSEUDO:
            return rows
        return [(row._replace(input_ids=row.input_ids[: row.places[0] + 1]), places) for row, places in rows]


class PermutedModel(LanguageModel):
    pads = False

    def inputs(self, batch: Sequence[Row]) -> dict[str, torch.Tensor]:
        ids = super().inputs(batch)["input_ids"]
        rows, length = ids.shape
        slots = torch.nn.functional.one_hot(torch.tensor([row.places for row in batch]), length).float()
        types = torch.zeros_like(ids)
        hidden = torch.ones(length, length).triu()  # from a prediction; what it predicts from sees itself, too
        if self.way == PSEUDO:
            types[:, -1], hidden = CLS_TYPE, slots
        hidden = hidden.expand(rows, length, length)
        return {"input_ids": ids, "token_type_ids": types, "perm_mask": hidden, "target_mapping": slots}

    def columns(self, row: Row) -> Sequence[int]:
        return range(len(row.places))


class PermutedSentences(TransformersScorer):
    """An XLNet: each token after those before it, without the first, or each with only itself hidden."""

    ways, model_class, auto_class = (LEFT_TO_RIGHT, PSEUDO), PermutedModel, transformers.XLNetLMHeadModel

    def rows(self, sentence: Encoded) -> list[Scored]:
        ids, places = sentence.ids, [at for at in sentence.places if at > 0 or self.way == PSEUDO]
        if self.way == PSEUDO:  # nothing sees what is at the target's place
            hide = self.tokenizer.unk_token_id
            return [(Row(sentence.masked([at], hide), (), (at,), (ids[at],)), [at]) for at in places]
        targets = tuple(ids[at] for at in places)
        return [(Row(ids[: places[-1] + 1], (), tuple(places), targets), places)] if places else []


class Discriminator(LanguageModel):
    """An ELECTRA's discriminator, with two classes: original and replaced."""

    def logits(self, batch: Sequence[Row]) -> torch.Tensor:
        found = self.model(**{name: value.to(self.model.device) for name, value in self.inputs(batch).items()}).logits
        replaced = torch.cat([row[list(one.places)] for row, one in zip(found, batch, strict=True)])
        return torch.stack([torch.zeros_like(replaced), replaced], dim=-1)


class DiscriminatorSentences(TransformersScorer):
    """An ELECTRA: the generator's pseudo-likelihood, the discriminator's sum of log P(original), or both.

    `electric` is log q(token) + logit P(original), the log-probability of Electric (Clark 2020) less a constant.
    """

    ways, model_class = (PSEUDO, "original", "electric"), Discriminator
    auto_class = transformers.ElectraForPreTraining
    generator: SentenceScorer

    def rows(self, sentence: Encoded) -> list[Scored]:
        places, classes = sentence.places, (0, 1) if self.way == "electric" else (0,)
        return [(Row(sentence.ids, (), tuple(places), (one,) * len(places)), places) for one in classes if places]

    def block(self, sentences: Sequence[str]) -> Iterable[TokenScores]:
        if self.way == "original":
            return super().block(sentences)
        drawn = self.generator.block(sentences)
        if self.way == PSEUDO:
            return drawn
        pairs = zip(drawn, super().block(sentences), strict=True)
        return [TokenScores(q.values + np.subtract(*np.split(both.values, 2)), q.spans) for q, both in pairs]


@dataclass
class DirectionSentences(SentenceScorer):
    """A model of words in the format of its family (ELMo): both directions of the full softmax, or one."""

    model: WordLayers
    definition: str
    way: str
    warm_up: Sequence[str]
    ways = ("both", "forward", "backward")

    def block(self, sentences: Sequence[str]) -> Iterable[TokenScores]:
        split = [self.model.split(sentence) for sentence in (*self.warm_up, *sentences)]
        words = [[word for word, _ in one] for one in split]
        first = len(self.warm_up)
        rows = {"both": slice(2), "forward": slice(1), "backward": slice(1, 2)}[self.way]
        for own, found in zip(split[first:], self.model.log_probs(words[first:], words[:first]), strict=True):
            yield TokenScores(found[rows].sum(axis=0), [span for _, span in own])


def open_scorer(
    folder: Path, definition: str = "babylm", way: str | None = None, batch_tokens: int = BATCH_TOKENS,
    warm_up: Sequence[str] = WARM_UP,
) -> SentenceScorer:  # fmt: skip
    """Open a folder in Hugging Face's form or (ELMo) in the family's format, as `ctxlm convert to-hf` writes it.

    `definition` and `way` (None: the first) are names of docs/minimal-pairs.md. A batch has at most `batch_tokens`
    positions. An ELMo without model.state_dropout, whose outputs for states of zero are arbitrary, reads the sentences
    `warm_up` first. Raises ConfigError, TokenizerError or ExportError if the folder holds no language model that is
    scored so, or is damaged.
    """
    kind, way = choose_scorer(folder, definition, way)
    if not issubclass(kind, TransformersScorer):
        own = own_format_in(folder)
        assert own is not None
        return DirectionSentences(own.word_layers(folder), definition, way, warm_up)
    tokenizer = load_tokenizer(folder, False)
    model = kind.model_class(load_model(folder, kind.auto_class), tokenizer.pad_token_id, batch_tokens, way)
    scorer = kind(model, tokenizer, longest_input(folder, tokenizer, 2**20), definition, way)
    if isinstance(scorer, DiscriminatorSentences) and way != "original":
        scorer.generator = open_scorer(folder / "generator", definition, batch_tokens=batch_tokens)
    return scorer


def choose_scorer(folder: Path, definition: str, way: str | None) -> tuple[type[SentenceScorer], str]:
    """Return the class and the way that score a folder's sentences; reads no weights, raises as `open_scorer`."""
    kind: type[SentenceScorer] = DirectionSentences
    if not folder.is_dir() or own_format_in(folder) is None:
        kind = _kind(folder, read_config(folder), load_tokenizer(folder, False))
    for option, value, known in (("definition", definition, kind.definitions), ("way", way, kind.ways)):
        if value is not None and value not in known:
            raise ConfigError(f"--{option} {value}: {folder} is scored by {', '.join(known)}")
    way = kind.ways[0] if way is None else way
    needs_inner = kind is DiscriminatorSentences and way != "original"
    if needs_inner and not (folder / "generator" / "config.json").is_file():
        raise ConfigError(f"{folder}: no folder generator, whose model --way {way} needs; choose original")
    return kind, way


def _kind(folder: Path, config: Any, tokenizer: Any) -> type[TransformersScorer]:
    """Return the scorer of a folder; ConfigError if its model is no language model."""
    classes = config.architectures or []
    if isinstance(config, transformers.ElectraConfig) and DiscriminatorSentences.auto_class.__name__ in classes:
        return DiscriminatorSentences
    if hasattr(config, "mem_len"):
        return PermutedSentences
    auto_class, _ = language_model.choose_class(folder, config, tokenizer)
    kinds = (MaskedSentences, CausalSentences, EncoderDecoderSentences)
    kind = next(one for one in kinds if one.auto_class is auto_class)
    is_unilm = kind is kinds[0] and getattr(config, "type_vocab_size", 0) == UNILM_TOKEN_TYPES
    return UnilmSentences if is_unilm else kind
