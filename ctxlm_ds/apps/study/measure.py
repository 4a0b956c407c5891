"""Train one run of a study and measure it: `python -m ctxlm_ds.apps.study.measure --config RECIPE --set ...`.

The figures go to RUN/study.json. Losses are those of the term of the objective that predicts tokens.
"""

from __future__ import annotations

import hashlib
import json
import sys
from statistics import fmean, median
from typing import Any

import numpy as np

from ctxlm_ds.apps.demo.pretrain_default import CTXLM, run_step
from ctxlm_ds.apps.evaluate.verdict import Predictions
from ctxlm_ds.apps.plan.check_run import parse_arguments
from ctxlm_ds.apps.study.statistics import items_of
from ctxlm_ds.atomic import write_text
from ctxlm_ds.checkpoint.folders import find_verified
from ctxlm_ds.checkpoint.saved_state import read_saved_state
from ctxlm_ds.console import logger, run_command, setup_logging
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.errors import CtxlmError
from ctxlm_ds.process.run_files import METRICS_NAME, read_lines
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import DataSection
from ctxlm_ds.registry import load_object
from ctxlm_ds.training.measure import useful_flops_per_row

FIGURES = "study.json"
EXPORT = "hf"
"""Folder of the exported model, in a run."""
GATE_NATS = 1.5
"""Nats below word frequencies from which on a model that fills gaps counts."""
TRILLION = 10**12


def main() -> None:
    from ctxlm_ds.export.huggingface import to_hf

    setup_logging()
    words = sys.argv[1:]
    run_step(CTXLM, "pretrain", *words)
    arguments = parse_arguments(words)
    config = load_config(arguments.config, arguments.set)
    figures = measure(config)
    try:
        to_hf(config.directory, config.directory / EXPORT)
    except CtxlmError as error:  # the losses stand without it
        logger.warning("not exported: %s", error)
    write_text(config.directory / FIGURES, json.dumps(figures, indent=1) + "\n")


def measure(config: RunConfig) -> dict[str, Any]:
    """Return the figures of a run that is complete: its losses on held-out text, the gate, and what it has spent.

    `held_out` is the hash of the held-out tokens that it predicts.
    """
    predictions = Predictions.of(config)
    found: dict[str, Any] = spent(config, predictions)
    if predictions is None:
        return found | {"loss": None, "items": [], "gate": None, "held_out": ""}
    with load_object("ctxlm_ds.api:Run")(config) as run:
        batches = [batch for of_source in run.evaluate_by_batch().values() for batch in of_source]
    labels = list(map(predictions.labels, predictions.held_out()))
    counts, predicted = np.array(list(map(len, labels))), hashlib.sha256(np.concatenate(labels).tobytes())
    items = items_of(np.array([batch[f"{predictions.term.name}_loss"] for batch in batches]), counts)
    loss, limit = float(items.mean()), gate(config.data, predictions)
    return found | {"loss": loss, "items": items.tolist(), "gate": limit, "held_out": predicted.hexdigest()}


def gate(data: DataSection, predictions: Predictions) -> float:
    """Return the loss above which a model is still on its plateau: of a trigram, or GATE_NATS below frequencies."""
    if predictions.objective.shifted:
        from ctxlm_ds.apps.evaluate.word_scorers import NgramModel  # transformers, seconds for each study

        train, held_out = (np.concatenate([np.asarray(IndexedDataset(source.path).tokens) for source in sources])
                           for sources in (data.train, data.validation))  # fmt: skip
        trigram = NgramModel(train.astype(np.int64), predictions.vocab_size, 3)
        return float(-np.log(trigram.probabilities(held_out.astype(np.int64))[2:]).mean())
    return fmean(figures.loss for _, figures in predictions.by_frequency()) - GATE_NATS


def spent(config: RunConfig, predictions: Predictions | None) -> dict[str, float]:
    """Return what a run has read, computed and waited for; predicted tokens by the mean of its first rows."""
    folder, _ = find_verified(config.directory)
    state = read_saved_state(folder)["train_state"]
    rows, steps = state["rows_consumed"], state["step"]
    seconds = [line["step_seconds"] for line in read_lines(config.directory / METRICS_NAME) if "step_seconds" in line]
    predicted = 0.0
    if predictions is not None:
        labels = [len(predictions.labels(batch)) for batch in predictions.trained()]
        predicted = fmean(labels) / config.training.micro_batch_size * rows
    return {
        "steps": steps, "words": state["words"], "tokens": state["tokens"], "predicted": round(predicted),
        "flops": useful_flops_per_row(config) * rows / TRILLION, "seconds": median(seconds) * steps,
    }  # fmt: skip


if __name__ == "__main__":
    run_command(main)
