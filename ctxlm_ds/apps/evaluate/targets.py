"""Tokens that a run predicts in held-out rows, next to their unigram distribution; of an encoder-decoder, its targets.

The distribution is that of the labels in training rows, add-one: sentinels and end tokens are counted like words. That
of restored tokens, which the inputs lack (EncoderDecoder.restored), counts these alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.loader import EvalLoader, TrainLoader
from ctxlm_ds.data.stream.run_datasets import RunRows, build_run_rows
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import LossTerm, Objective, build_objective
from ctxlm_ds.objectives.encoder_decoder import DECODER_FIELDS, LABELS, EncoderDecoder
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import OBJECTIVES
from ctxlm_ds.run import resolve

if TYPE_CHECKING:
    from typing import Self

COUNTED_ROWS = 8192
"""Training rows whose labels are counted."""


class Figures(NamedTuple):
    """Of some target tokens."""

    loss: float
    """Mean cross entropy in nats."""
    accuracy: float
    """Share of the tokens that are the most probable ones."""


@dataclass
class Predictions:
    """The rows of a run, and the first term of its loss that predicts tokens."""

    config: RunConfig
    objective: Objective
    rows: RunRows
    term: LossTerm

    @classmethod
    def of(cls, config: RunConfig) -> Self | None:
        """Open the rows of a recipe that names tokenizer and data; None if its objective predicts no tokens."""
        config, tokenizer = resolve(config.with_values("data", num_workers=0))
        objective = build_objective(config.objective, tokenizer)
        term = next((term for term in objective.terms if term.predicts_tokens), None)
        if term is None:
            return None
        return cls(config, objective, build_run_rows(config.row_settings, tokenizer, objective, verify="changed"), term)

    def held_out(self, *sources: str) -> Iterator[Batch]:
        """Yield the micro-batches on which a run evaluates, of these sources or of all."""
        for name in sources or self.rows.validation:
            rows = self.rows.validation[name]
            yield from EvalLoader(rows, self.objective, self.config.data, self.config.training, self.config.evaluation)

    def trained(self) -> Iterator[Batch]:
        """Yield the micro-batches of the first training rows."""
        training = self.config.training
        num_steps = -(-min(COUNTED_ROWS, len(self.rows.train)) // training.global_batch_size)
        for step in islice(TrainLoader(self.rows.train, self.objective, self.config.data, training), num_steps):
            yield from step.micro_batches

    def labels(self, batch: Batch) -> NDArray[np.int64]:
        """Return the tokens [t] that are predicted in a batch."""
        labels = batch.fields[self.term.labels[0]].numpy()
        return labels[labels != IGNORE_LABEL].astype(np.int64)

    def by_frequency(self) -> Iterator[tuple[str, Figures]]:
        """Yield the figures of the unigram distribution on each held-out source."""
        counts = np.ones(self.config.model.vocab_size or 0)
        for batch in self.trained():
            counts += np.bincount(self.labels(batch), minlength=len(counts))
        for name in self.rows.validation:
            yield name, _of_shares(counts / counts.sum(), np.concatenate(list(map(self.labels, self.held_out(name)))))


class Targets(Predictions):
    """The rows of a run whose objective has targets.

    Raises ConfigError for another objective, and if the recipe names no held-out data.
    """

    objective: EncoderDecoder

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Open the rows of a recipe that names tokenizer and data."""
        if not issubclass(OBJECTIVES.get(config.objective.name), EncoderDecoder):
            raise ConfigError(f"objective.name {config.objective.name} has no targets; name one of an encoder-decoder")
        found = super().of(config)
        if not (found and found.rows.validation):
            raise ConfigError("data.validation is empty: name held-out datasets, as in training")
        return found

    def unigram_figures(self) -> tuple[Figures, Figures]:
        """Return the unigram distributions' figures of all target tokens, and of restored ones."""
        every, inside = (np.ones(self.config.model.vocab_size or 0) for _ in range(2))
        for batch in self.trained():
            labels = self.labels(batch)
            every += np.bincount(labels, minlength=len(every))
            inside += np.bincount(labels[self._restored(batch)], minlength=len(inside))
        labels = np.concatenate(list(map(self.labels, self.held_out())))
        restored = np.concatenate([self._restored(batch) for batch in self.held_out()])
        return _of_shares(every / every.sum(), labels), _of_shares(inside / inside.sum(), labels[restored])

    @torch.no_grad()
    def model_figures(self, folder: Path, shift: int = 0) -> tuple[Figures, Figures]:
        """Return the figures of an exported model, computed by transformers, on the same tokens.

        With `shift` each row has the input of the row so many places before in its micro-batch. Raises ConfigError if
        a row may hold several texts.
        """
        if self.config.data.shares_rows:
            raise ConfigError("data.packing: transformers takes rows of one text; set it to false")
        import transformers

        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        losses, hits, restored = [], [], []
        ids, _, sequences, _ = DECODER_FIELDS
        for batch in self.held_out():
            fields = {name: field.long() for name, field in batch.fields.items()}
            labels = fields[LABELS]
            kept = labels != IGNORE_LABEL
            inputs, mask = (fields[name].roll(shift, 0) for name in ("input_ids", "sequence_ids"))
            logits = model(
                input_ids=inputs, attention_mask=(mask > 0).long(), decoder_input_ids=fields[ids],
                decoder_attention_mask=(fields[sequences] > 0).long(),
            ).logits.float()[kept]  # fmt: skip
            losses.append(functional.cross_entropy(logits, labels[kept], reduction="none"))
            hits.append(logits.argmax(-1) == labels[kept])
            restored.append(self._restored(batch))
        loss, hit = torch.cat(losses).double().numpy(), torch.cat(hits).numpy()
        every, inside = ((loss[chosen], hit[chosen]) for chosen in (slice(None), np.concatenate(restored)))
        return _means(*every), _means(*inside)

    def _restored(self, batch: Batch) -> NDArray[np.bool_]:
        """Return [t]: True for restored ones of the labels of a batch."""
        fields = {name: field.numpy() for name, field in batch.fields.items()}
        return self.objective.restored(fields)[fields[LABELS] != IGNORE_LABEL]


def _of_shares(shares: NDArray[np.float64], labels: NDArray[np.int64]) -> Figures:
    return _means(-np.log(shares)[labels], labels == shares.argmax())


def _means(loss: NDArray[np.float64], hit: NDArray[np.bool_]) -> Figures:
    return Figures(float(loss.mean()), float(hit.mean()))
