"""Say in plain words what a run has learned: its loss on held-out text, next to the loss of word frequencies."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from ctxlm_ds.apps.evaluate.targets import Figures, Predictions
from ctxlm_ds.console import logger
from ctxlm_ds.process.run_files import HELD_OUT, METRICS_NAME, read_lines, update_status
from ctxlm_ds.training.hooks.curves import points_of
from ctxlm_ds.training.hooks.hooks import Hook, RunEnd

NOTHING, BEGINNING = 0.1, 1.0
"""Nats below word frequencies up to which a model has learned nothing from context, or a beginning."""
REPEATS_NATS, REPEATS_EPOCHS = 0.7, 3
"""Held-out loss above the training loss, and epochs, from which on a model repeats its training text."""
MOST_LINES, LAST_LINES = 2000, 10  # of metrics.jsonl that are read, about, and whose mean is the training loss


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
        if end.failed or end.signal_number or end.step == 0:
            return  # a signal leaves little time
        lines = verdict(self._open_predictions(), self._run_dir)
        update_status(self._run_dir, verdict=lines)
        for line in lines:
            logger.info("  verdict: %s", line)
