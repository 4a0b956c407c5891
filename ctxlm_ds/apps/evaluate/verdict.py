"""Say in plain words what a run has learned: its loss on held-out text, next to the loss of word frequencies.

Frequencies are those of the labels in training rows, add-one: sentinels and end tokens are counted like words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.console import logger
from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.loader import EvalLoader, TrainLoader
from ctxlm_ds.data.stream.run_datasets import RunRows, build_run_rows
from ctxlm_ds.objectives.base import LossTerm, Objective, build_objective
from ctxlm_ds.process.run_files import HELD_OUT, METRICS_NAME, read_lines, update_status
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.load import open_tokenizer
from ctxlm_ds.training.hooks.curves import points_of
from ctxlm_ds.training.hooks.hooks import Hook, RunEnd

NOTHING, BEGINNING = 0.1, 1.0
"""Nats below word frequencies up to which a model has learned nothing from context, or a beginning."""
REPEATS_NATS, REPEATS_EPOCHS = 0.7, 3
"""Held-out loss above the training loss, and epochs, from which on a model repeats its training text."""
MOST_LINES, LAST_LINES = 2000, 10  # of metrics.jsonl that are read, about, and whose mean is the training loss

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
    vocab_size: int
    objective: Objective
    rows: RunRows
    term: LossTerm

    @classmethod
    def of(cls, config: RunConfig) -> Self | None:
        """Open the rows of a recipe that names tokenizer and data; None if its objective predicts no tokens."""
        config = config.with_values("data", num_workers=0)
        tokenizer, vocab_size = open_tokenizer(config.tokenizer.path, config.model.vocab_size)
        objective = build_objective(config.objective, tokenizer)
        term = next((term for term in objective.terms if term.predicts_tokens), None)
        if term is None:
            return None
        rows = build_run_rows(config.row_settings, tokenizer, objective, verify="changed")
        return cls(config, vocab_size, objective, rows, term)

    def held_out(self, *sources: str) -> Iterator[Batch]:
        """Yield the micro-batches on which a run evaluates, of these sources or of all."""
        sections = self.config.data, self.config.training, self.config.evaluation
        for name in sources or self.rows.validation:
            yield from EvalLoader(self.rows.validation[name], self.objective, *sections)

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
        counts = np.ones(self.vocab_size)
        for batch in self.trained():
            counts += np.bincount(self.labels(batch), minlength=len(counts))
        for name in self.rows.validation:
            labels = np.concatenate(list(map(self.labels, self.held_out(name))))
            yield name, figures_of_shares(counts / counts.sum(), labels)


def figures_of_shares(shares: NDArray[np.float64], labels: NDArray[np.int64]) -> Figures:
    """Return the figures of tokens [t] under one distribution [vocab]."""
    return mean_figures(-np.log(shares)[labels], labels == shares.argmax())


def mean_figures(loss: NDArray[np.float64], hit: NDArray[np.bool_]) -> Figures:
    """Return the means over tokens."""
    return Figures(float(loss.mean()), float(hit.mean()))


def verdict(predictions: Predictions | None, run_dir: Path) -> list[str]:
    """Return lines about the last evaluation of a run on these rows; None if its objective predicts no tokens."""
    if predictions is None:
        return ["the loss counts no tokens and says little by itself; to judge the model, fine-tune it: ctxlm finetune"]
    if not predictions.rows.validation:
        return ["no text was held out (data.validation), so nobody knows what the model does with new text"]
    records, term = list(read_lines(run_dir / METRICS_NAME, MOST_LINES)), predictions.term.name
    trained = [loss for _, loss in points_of(records, term)[-LAST_LINES:]]
    epochs = max((int(epoch) for _, epoch in points_of(records, "epoch")), default=0)
    lines = []
    for source, known in predictions.by_frequency():
        found = (points_of(records, f"{HELD_OUT}{source}/{term}_{figure}") for figure in ("loss", "accuracy"))
        losses, accuracies = ([value for _, value in points] for points in found)
        if not losses:
            continue
        model = Figures(losses[-1], accuracies[-1] if accuracies else 0.0)
        said = "it has learned from context"
        if known.loss - model.loss < BEGINNING:
            said = "it has begun to learn from context; more steps will help"
        if known.loss - model.loss < NOTHING:
            said = "it has learned nothing from context yet: docs/training.md, When a run does not learn"
        lines.append(f"{source}: {_shown(model)}; word frequencies alone: {_shown(known)}; {said}")
        if trained and epochs >= REPEATS_EPOCHS and model.loss - fmean(trained) > REPEATS_NATS:
            lines.append(
                f"the training loss is far lower, {fmean(trained):.2f}: the model repeats its text after {epochs} "
                "epochs; take more text, fewer steps or a smaller model"
            )
    return lines


def _shown(figures: Figures) -> str:
    perplexity = math.exp(min(figures.loss, 50.0))
    return f"{figures.loss:.2f} nats (perplexity {perplexity:.3g}), {figures.accuracy:.0%} of the tokens right"


class VerdictHook(Hook):
    """Says it at the end of a run, also in RUN/status.json; a failure of it is only a warning."""

    may_fail = True
    failures = (Exception,)

    def __init__(self, open_predictions: Callable[[], Predictions | None], run_dir: Path) -> None:
        self._open_predictions, self._run_dir = open_predictions, run_dir

    def on_run_end(self, end: RunEnd) -> None:
        if end.failed or end.signal_number or end.step == 0 or end.phase_over:
            return  # a signal leaves little time
        lines = verdict(self._open_predictions(), self._run_dir)
        update_status(self._run_dir, verdict=lines)
        for line in lines:
            logger.info("  verdict: %s", line)
