"""Score the model of a run of a study on tasks: minimal pairs, and probes of its frozen layers on tagged words."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.downstream.examples import Parts, grouped
from ctxlm_ds.apps.downstream.task import TaskDescription, load_task
from ctxlm_ds.apps.evaluate.suite import PAIRS
from ctxlm_ds.apps.study.measure import EXPORT
from ctxlm_ds.atomic import output_folder, read_object, write_text
from ctxlm_ds.console import logger, run_command, setup_logging
from ctxlm_ds.errors import CtxlmError
from ctxlm_ds.installed import check_extra
from ctxlm_ds.process.launch import quiet_libraries
from ctxlm_ds.recipe.load import load_saved_config

SCORES = "scores.json"
PAIRS_OF_PARADIGM, TRAIN_SENTENCES, DEV_SENTENCES = 50, 1000, 500
RATES, EPOCHS, BATCH = (5e-5, 3e-4, 1e-3), 8.0, 32
"""Of fine-tuning; the rate that is best on the development sentences counts, as the best layer does."""
VECTORS = "vectors.txt"
WORD = re.compile(r"\w+|[^\w\s]")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder with blimp/ and conll2003/")
    parser.add_argument("--measures", nargs="+", required=True)
    parser.add_argument("--readings", nargs="*", default=[], help="further uses of the model (definition.Reading)")
    parser.add_argument("--text", type=Path, help="text of word2vec, a JSON line for each document")
    arguments = parser.parse_args(argv)
    setup_logging()
    quiet_libraries()
    model = arguments.run_dir / EXPORT
    found = read_object(arguments.run_dir / SCORES) or {}
    for name in arguments.measures:
        try:
            found[name] = found.get(name) or score(model, name, arguments.data)
            write_text(arguments.run_dir / SCORES, json.dumps(found, indent=1) + "\n")
            missing = set(arguments.readings) - set(found[name]["items"]) if name != PAIRS else ()
            for reading in sorted(missing):
                found[name]["items"][reading] = read_otherwise(model, reading, name, arguments.data, arguments.text)
                write_text(arguments.run_dir / SCORES, json.dumps(found, indent=1) + "\n")
        except CtxlmError as error:
            logger.warning("%s: not measured: %s", name, error)


def folder_of(measure: str, data: Path) -> Path:
    """Return the folder of a measure's files in --data."""
    return data / ("blimp" if measure == PAIRS else measure.partition("-")[0])


def score(model: Path, measure: str, data: Path) -> dict[str, Any]:
    """Return a model's figures on a measure; `items` has the score of each pair, or of each sentence by reading."""
    return score_pairs(model, folder_of(measure, data)) if measure == PAIRS else score_layers(model, measure, data)


def score_pairs(model: Path, data: Path) -> dict[str, Any]:
    from ctxlm_ds.apps.evaluate.pairs import outcomes_of, read_pairs
    from ctxlm_ds.apps.evaluate.pairs import score_pairs as scores_of
    from ctxlm_ds.apps.evaluate.scorers import open_scorer

    kept = grouped((pair.paradigm, pair) for pair in read_pairs(data))
    pairs = [pair for several in kept.values() for pair in several[:PAIRS_OF_PARADIGM]]
    return {"items": outcomes_of(scores_of(open_scorer(model), pairs)).tolist()}


def parts_of(task_name: str, data: Path) -> tuple[TaskDescription, Parts]:
    """Return a task and its first sentences."""
    from ctxlm_ds.apps.downstream.prepare import read_parts

    _, task = load_task(task_name)
    parts = read_parts(task, folder_of(task_name, data), TRAIN_SENTENCES)
    return task, replace(parts, dev=parts.dev[:DEV_SENTENCES], test=None)


def score_layers(model: Path, task_name: str, data: Path) -> dict[str, Any]:
    from ctxlm_ds.apps.downstream.features.sources import open_source
    from ctxlm_ds.apps.study.probes import TaggedWords, probe

    _, parts = parts_of(task_name, data)
    train, dev = parts.train, parts.dev
    words = {form for example in (*train, *dev) for word in example.words for form in (word, word.lower())}
    source = open_source(model, vocabulary=words)
    labels = sorted({tag for example in train for tag in example.tags})
    known, new = (TaggedWords.of(source, examples, labels) for examples in (train, dev))
    return probe(known, new, len(labels) + 1)


def read_otherwise(model: Path, reading: str, task_name: str, data: Path, text: Path) -> list[float]:
    """Return the score of each sentence if the model is fine-tuned, or other vectors take its place."""
    seed = load_saved_config(model.parent / "config.yaml").training.seed
    if reading == "fine-tuned":
        return fine_tuned(model, task_name, data, seed)
    other = model.with_name(reading)
    if not other.exists():
        (randomized if reading == "random" else trained_word2vec)(model, other, text, seed)
    vectors = other / VECTORS if reading == "word2vec" else other
    return list(score_layers(vectors, task_name, data)["items"]["best-layer"])


def fine_tuned(model: Path, task_name: str, data: Path, seed: int) -> list[float]:
    """Fine-tune the complete model and return the score of each sentence, with the best of RATES."""
    import numpy as np

    from ctxlm_ds.apps.downstream.fit import run_point
    from ctxlm_ds.apps.downstream.prepare import make_kind, make_sets
    from ctxlm_ds.apps.downstream.results import PREDICTIONS, FitSettings, Point
    from ctxlm_ds.apps.study.probes import by_sentence

    task, parts = parts_of(task_name, data)
    kind = make_kind(task, model, parts)
    sets, found = make_sets(kind, parts), list[Any]()
    truth = [np.array(kind.labels)[kind.target(one)] for one in parts.dev]  # in the scheme of the predictions
    for rate in RATES:
        point = Point(BATCH, rate, EPOCHS, seed)
        folder = model.with_name("fine-tuned") / task_name / point.name
        run_point(model, kind, sets, point, FitSettings(), folder, {})
        with open(folder / PREDICTIONS.format("dev"), encoding="utf-8") as file:
            predicted = [json.loads(line)["prediction"] for line in file]
        found.append(np.concatenate([np.array(row) == tags for row, tags in zip(predicted, truth, strict=True)]))
    return by_sentence(max(found, key=lambda right: right.mean()), np.array([len(one.words) for one in parts.dev]))


def randomized(model: Path, folder: Path, _: Path, seed: int) -> None:
    """Write a model of the same shape with the initial values that transformers gives it."""
    import torch
    from transformers import AutoModel

    from ctxlm_ds.apps.downstream.prepare import read_config

    with output_folder(folder) as partial:
        shutil.copytree(model, partial, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
        torch.manual_seed(seed)
        AutoModel.from_config(read_config(model)).save_pretrained(partial)


@dataclass(frozen=True)
class _Lines:
    """The lines of a file of documents as words in lower case; each pass reads it again."""

    path: Path

    def __iter__(self) -> Iterator[list[str]]:
        with open(self.path, encoding="utf-8") as file:
            for document in file:
                yield from (WORD.findall(line) for line in json.loads(document)["text"].lower().split("\n"))


def trained_word2vec(model: Path, folder: Path, text: Path, seed: int) -> None:
    """Write vectors of skip-grams (Mikolov et al. 2013) of the training text, as wide as the model."""
    check_extra("downstream", ["gensim"])
    from gensim.models import Word2Vec

    from ctxlm_ds.apps.downstream.prepare import read_config

    width = read_config(model).hidden_size
    trained = Word2Vec(_Lines(text), vector_size=width, sg=1, negative=5, min_count=5, epochs=3, seed=seed, workers=1)
    with output_folder(folder) as partial:
        trained.wv.save_word2vec_format(str(partial / VECTORS), binary=False)


if __name__ == "__main__":
    run_command(main)
