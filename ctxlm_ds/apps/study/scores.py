"""Score the model of a run of a study on tasks: minimal pairs, and probes of its frozen layers on tagged words."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.downstream.task import load_task
from ctxlm_ds.apps.evaluate.suite import PAIRS
from ctxlm_ds.atomic import read_object, write_text
from ctxlm_ds.console import logger, run_command, setup_logging
from ctxlm_ds.errors import CtxlmError
from ctxlm_ds.process.library_noise import quiet_libraries

SCORES = "scores.json"
PAIRS_OF_PARADIGM, TRAIN_SENTENCES, DEV_SENTENCES = 50, 1000, 500


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder with blimp/ and conll2003/")
    parser.add_argument("--measures", nargs="+", required=True)
    arguments = parser.parse_args(argv)
    setup_logging()
    quiet_libraries()
    from ctxlm_ds.export.huggingface import to_hf

    model = arguments.run_dir / "hf"
    if not model.exists():
        to_hf(arguments.run_dir, model)
    found = read_object(arguments.run_dir / SCORES) or {}
    for name in arguments.measures:
        try:
            found[name] = found.get(name) or score(model, name, arguments.data)
        except CtxlmError as error:
            logger.warning("%s: not measured: %s", name, error)
    write_text(arguments.run_dir / SCORES, json.dumps(found, indent=1) + "\n")


def score(model: Path, measure: str, data: Path) -> dict[str, Any]:
    """Return the figures of a model, or of a file of static vectors, on a measure; `items` are their parts."""
    return score_pairs(model, data / "blimp") if measure == PAIRS else score_layers(model, measure, data)


def score_pairs(model: Path, data: Path) -> dict[str, Any]:
    from ctxlm_ds.apps.evaluate.pairs import outcomes_of, read_pairs
    from ctxlm_ds.apps.evaluate.pairs import score_pairs as scores_of
    from ctxlm_ds.apps.evaluate.scorers import open_scorer

    kept: dict[str, list[Any]] = {}
    for pair in read_pairs(data):
        kept.setdefault(pair.paradigm, []).append(pair)
    pairs = [pair for several in kept.values() for pair in several[:PAIRS_OF_PARADIGM]]
    return {"items": outcomes_of(scores_of(open_scorer(model), pairs)).tolist()}


def score_layers(model: Path, task_name: str, data: Path) -> dict[str, Any]:
    from ctxlm_ds.apps.downstream.features.sources import open_source
    from ctxlm_ds.apps.downstream.prepare import read_parts
    from ctxlm_ds.apps.study.probes import TaggedWords, probe

    _, task = load_task(task_name)
    parts = read_parts(task, data / task_name.partition("-")[0], TRAIN_SENTENCES)
    train, dev = parts.train, parts.dev[:DEV_SENTENCES]
    words = {form for example in (*train, *dev) for word in example.words for form in (word, word.lower())}
    source = open_source(model, vocabulary=words)
    labels = sorted({tag for example in train for tag in example.tags})
    known, new = (TaggedWords.of(source, examples, labels) for examples in (train, dev))
    return probe(known, new, len(labels) + 1)


if __name__ == "__main__":
    run_command(main)
