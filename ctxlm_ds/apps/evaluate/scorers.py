"""Opens a model folder as a scorer of sentences; scorers of the models that hide tokens in several ways.

Shape letters: b rows, s positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from ctxlm_ds.apps.downstream.language_model import BATCH_TOKENS, LanguageModel, Row, load_model
from ctxlm_ds.apps.downstream.model_folder import read_config
from ctxlm_ds.apps.downstream.prepare import load_tokenizer, longest_input
from ctxlm_ds.apps.downstream.prompting import choose_class
from ctxlm_ds.apps.evaluate import scoring
from ctxlm_ds.apps.evaluate.scoring import LEFT_TO_RIGHT, PSEUDO, Encoded, Scored, SentenceScorer, TokenScores
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.export.base import WordLayers, own_format_in
from ctxlm_ds.families.bert.config import UNILM_TOKEN_TYPES

DIRECTED_TYPE, CLS_TYPE = 2, 2
"""Token types of UniLM's left-to-right texts (objectives/corruption/kinds.py), and of XLNet's last token."""
WARM_UP = (
    "The town stands on the left bank of the river .", "She has worked there since the end of the war .",
    "In the same year he was elected a member of the council , and two years later he became its head .",
)  # fmt: skip


class UnilmModel(LanguageModel):
    """A UniLM."""

    pads = False

    def inputs(self, batch: Sequence[Row]) -> dict[str, torch.Tensor]:
        inputs = super().inputs(batch)
        if self.way == PSEUDO:
            return inputs
        rows, length = inputs["input_ids"].shape
        seen = torch.ones(length, length, dtype=torch.bool).tril().expand(rows, 1, length, length)
        return inputs | {"attention_mask": seen, "token_type_ids": torch.full((rows, length), DIRECTED_TYPE)}


class UnilmSentences(scoring.MaskedSentences):
    """A UniLM: each token masked alone, seen from both sides, or from the left only."""

    ways, definitions, model_class = (PSEUDO, LEFT_TO_RIGHT), ("babylm",), UnilmModel

    def rows(self, sentence: Encoded) -> list[Scored]:
        rows = super().rows(sentence)
        if self.way == PSEUDO:
            return rows
        return [(row._replace(input_ids=row.input_ids[: row.places[0] + 1]), places) for row, places in rows]


class PermutedModel(LanguageModel):
    """An XLNet."""

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


class PermutedSentences(scoring.TransformersScorer):
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


class DiscriminatorSentences(scoring.TransformersScorer):
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

    `definition` is a name of DEFINITIONS, and `way` one of the scorer's `ways` (None: the first). A batch has at most
    `batch_tokens` positions. An ELMo without model.state_dropout, whose outputs for states of zero are arbitrary, reads
    the sentences `warm_up` first.

    Raises:
        ConfigError, TokenizerError, ExportError: the folder holds no language model that is scored so, or is damaged.
    """
    kind, way = choose_scorer(folder, definition, way)
    if not issubclass(kind, scoring.TransformersScorer):
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


def _kind(folder: Path, config: Any, tokenizer: Any) -> type[scoring.TransformersScorer]:
    """Return the scorer of a folder; ConfigError if its model is no language model."""
    classes = config.architectures or []
    if isinstance(config, transformers.ElectraConfig) and DiscriminatorSentences.auto_class.__name__ in classes:
        return DiscriminatorSentences
    if hasattr(config, "mem_len"):
        return PermutedSentences
    auto_class, _ = choose_class(folder, config, tokenizer)
    kinds = (scoring.MaskedSentences, scoring.CausalSentences, scoring.EncoderDecoderSentences)
    kind = next(one for one in kinds if one.auto_class is auto_class)
    is_unilm = kind is kinds[0] and getattr(config, "type_vocab_size", 0) == UNILM_TOKEN_TYPES
    return UnilmSentences if is_unilm else kind
