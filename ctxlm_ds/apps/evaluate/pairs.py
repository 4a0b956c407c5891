"""Minimal pairs (Warstadt 2020): files of sentence_good and sentence_bad, and how often the good one scores higher.

Shape letter: p pairs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ctxlm_ds.apps.downstream.examples import OPENERS, grouped, json_rows, read_text
from ctxlm_ds.apps.downstream.language_model import Values
from ctxlm_ds.apps.evaluate.scorers import BLOCK, SentenceScorer
from ctxlm_ds.console import byte_progress
from ctxlm_ds.errors import DataError

SENTENCES = ("sentence_good", "sentence_bad")
TIE = 1e-6
"""Largest difference of a tie, as a share of the larger magnitude of both scores."""
MERGED = {"s-selection": "argument_structure"}
"""Terms in BLiMP's files that belong to another one of its 12 phenomena."""


class Pair(NamedTuple):
    """A minimal pair, with FILE:LINE as its origin."""

    good: str
    bad: str
    paradigm: str
    phenomenon: str
    origin: str


class Accuracy(NamedTuple):
    """How often the good sentence has the higher score."""

    value: float
    """Share of pairs, with ties counted half."""
    ties: float
    pairs: int

    @property
    def ties_right(self) -> float:
        """Return the value with ties counted right."""
        return self.value + self.ties / 2

    def shown(self) -> dict[str, float]:
        return {"accuracy": self.value, "ties": self.ties, "ties_right": self.ties_right}


def read_pairs(path: Path) -> list[Pair]:
    """Read a file of JSON lines, plain, .xz or .gz, or all such files of a folder in the order of their names.

    `UID` and `linguistics_term` name paradigm and phenomenon; without them, the file's name does. Raises DataError with
    file and line if there is no such file, or a line is damaged or lacks a sentence.
    """
    files = [path] if path.is_file() else sorted(one for end in OPENERS for one in path.glob(f"*.jsonl{end}"))
    if len({file.name.partition(".jsonl")[0] for file in files}) < len(files):
        raise DataError(f"{path}: has a file twice, compressed in one or another way; leave one of them")
    pairs = [_pair(file, line, row) for file in files for line, row in json_rows(file, read_text(file))]
    if not pairs:
        raise DataError(f"{path}: no minimal pairs; give a file *.jsonl (also .xz or .gz) with an object of "
                        f"{' and '.join(SENTENCES)} a line, or a folder of such files")  # fmt: skip
    return pairs


def _pair(file: Path, line: int, row: dict[Any, Any]) -> Pair:
    for name in SENTENCES:
        text = row.get(name)
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{file}:{line}: {name} is {'missing' if text is None else 'no text'}; a line is an object "
                            f"with the texts {' and '.join(SENTENCES)}")  # fmt: skip
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise DataError(f"{file}:{line}: {name} has half of a surrogate pair, which is no character; correct it")
    stem = file.name.partition(".jsonl")[0]
    phenomenon = str(row.get("linguistics_term") or stem)
    good, bad = (row[name] for name in SENTENCES)
    return Pair(good, bad, str(row.get("UID") or stem), MERGED.get(phenomenon, phenomenon), f"{file}:{line}")


def score_pairs(scorer: SentenceScorer, pairs: Sequence[Pair], kept: Path | None = None) -> Values:
    """Return the scores in nats of good and bad sentences, float64 [p, 2]; DataError for one that cannot be read.

    `kept` is a file of the scores of an earlier call with these pairs, which was interrupted: this call continues it.
    """
    sentences = [text for pair in pairs for text in pair[:2]]
    before = kept.read_text() if kept is not None and kept.exists() else ""
    lines = before[: before.rfind("\n") + 1].splitlines()
    scores = [float(line) for line in lines[: len(lines) // BLOCK * BLOCK]]
    left, done_bytes = sentences[len(scores) :], 0
    with byte_progress("minimal pairs", sum(map(len, left))) as progress, open(kept or os.devnull, "w") as file:
        file.writelines(f"{score!r}\n" for score in scores)
        for text, score in zip(left, scorer.score_each(left), strict=True):
            scores.append(score)
            done_bytes += len(text)
            file.write(f"{score!r}\n")
            if len(scores) % BLOCK == 0:
                file.flush()
            progress.update(done_bytes, f"{len(scores):,} of {len(sentences):,} sentences")
    return np.array(scores).reshape(-1, 2)


def judge_pairs(
    scorer: SentenceScorer, pairs: Sequence[Pair], kept: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what metrics.json has of pairs, phenomena and paradigms, and a row of each pair; removes `kept`."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    scores = score_pairs(scorer, pairs, kept)
    kept.unlink()
    outcomes = outcomes_of(scores)
    groups = {"phenomena": accuracies(outcomes, [one.phenomenon for one in pairs]),
              "paradigms": accuracies(outcomes, [one.paradigm for one in pairs])}  # fmt: skip
    values = {kind: {name: {**one.shown(), "pairs": one.pairs} for name, one in found.items()}
              for kind, found in groups.items()}  # fmt: skip
    rows = [{"id": pair.origin, "paradigm": pair.paradigm, "scores": list(both), "right": float(right)}
            for pair, both, right in zip(pairs, scores.tolist(), outcomes, strict=True)]  # fmt: skip
    return {"groups": values, "dev": mean_accuracy(groups["paradigms"].values()).shown()}, rows


def outcomes_of(scores: Values) -> Values:
    """Return 1 for each pair of scores [p, 2] of which the good one is higher, 0.5 for a tie, else 0: [p]."""
    ties = np.abs(scores[:, 0] - scores[:, 1]) <= TIE * np.abs(scores).max(axis=1)
    return np.where(ties, 0.5, scores[:, 0] > scores[:, 1])


def accuracies(outcomes: Values, groups: Iterable[str]) -> dict[str, Accuracy]:
    """Return the accuracy of the outcomes [p] of each group, such as the pairs' paradigms or phenomena, by name."""
    found = {name: outcomes[own] for name, own in grouped((name, at) for at, name in enumerate(groups)).items()}
    return {name: Accuracy(float(own.mean()), float((own == 0.5).mean()), len(own)) for name, own in found.items()}


def mean_accuracy(parts: Iterable[Accuracy]) -> Accuracy:
    """Return the mean of accuracies, each of the same weight, and the number of all pairs; at least one."""
    values, ties, counts = zip(*parts, strict=True)
    return Accuracy(float(np.mean(values)), float(np.mean(ties)), sum(counts))
