"""What happened to a corpus: counts of each source and stage, a sample of what was dropped, expected counts.

In: StagedChunks and the duplicates among them. Out: corpus.json (without times: the same command gives the same bytes)
and the lines of dropped.jsonl; for a later tool, what a corpus.json beside its inputs says.
"""

from __future__ import annotations

import glob
import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctxlm_ds.data.hygiene.corpora import CorpusRecipe, CorpusSource, expectations
from ctxlm_ds.data.hygiene.record import EMPTY_STAGE, Amount, Dropped, Part, StagedChunk, active_stages
from ctxlm_ds.errors import DataError

CORPUS_FORMAT = "ctxlm_ds-corpus"
CORPUS_VERSION = 1
REPORT_NAME = "corpus.json"
SAMPLE_SIZE = 100
"""Dropped documents of each stage that dropped.jsonl shows."""


@dataclass(slots=True)
class SourceCounts:
    """One source."""

    records: int = 0
    read: Amount = field(default_factory=Amount)
    written: Amount = field(default_factory=Amount)
    unreadable: Counter[str] = field(default_factory=Counter)

    def measured(self, measure: str) -> int:
        """The number that an Expectation's `measure` names."""
        if measure == "records_read":
            return self.records
        what, _, when = measure.rpartition("_")
        amount = self.read if when == "read" else self.written
        return {"documents": amount.documents, "words": amount.words, "bytes": amount.num_bytes}[what]


@dataclass(slots=True)
class StageCounts:
    """One stage."""

    documents: int = 0
    words: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class DroppedSample:
    """For each stage the dropped documents with the smallest keys: an even sample, the same in every run."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[int, int, str]]] = {}
        self._arrivals = 0

    def add(self, dropped: Dropped, source: str, record: int, path: str) -> None:
        """`record` counts from 1 within the source."""
        key = int.from_bytes(hashlib.blake2b(f"{source}\0{record}".encode(), digest_size=8).digest(), "big")
        heap = self._heaps.setdefault(dropped.stage, [])
        self._arrivals += 1
        if len(heap) == SAMPLE_SIZE and -heap[0][0] <= key:
            return
        shown: dict[str, Any] = {"stage": dropped.stage, "reason": dropped.reason, "source": source, "record": record}
        shown["file"] = path.encode("utf-8", "replace").decode("utf-8")
        shown |= {} if dropped.duplicate_of is None else {"duplicate_of": dropped.duplicate_of}
        line = json.dumps(shown | {"words": dropped.words, "text": dropped.excerpt}, ensure_ascii=False)
        (heapq.heappush if len(heap) < SAMPLE_SIZE else heapq.heapreplace)(heap, (-key, self._arrivals, line))

    def lines(self, stages: Iterable[str]) -> Iterable[str]:
        """By stage, then in the order of the corpus."""
        for stage in stages:
            for _, _, line in sorted(self._heaps.get(stage, []), key=lambda entry: entry[1]):
                yield line


class CorpusCounts:
    """Everything that is counted while a corpus is prepared."""

    def __init__(self, recipe: CorpusRecipe) -> None:
        self.recipe = recipe
        self.sources = [SourceCounts() for _ in recipe.sources]
        self.stages = {stage: StageCounts() for stage in (EMPTY_STAGE, *active_stages(recipe.filters))}
        self.removed_characters: Counter[str] = Counter()
        self.sample = DroppedSample()

    @property
    def records(self) -> int:
        return sum(source.records for source in self.sources)

    def add_chunk(self, chunk: StagedChunk) -> None:
        """A worker's counts; what it dropped itself too."""
        source = self.sources[chunk.source]
        for dropped in chunk.dropped:
            self.drop(dropped, chunk)
        source.records += chunk.records
        source.read.add(chunk.read.words, chunk.read.num_bytes, chunk.read.documents)
        source.unreadable.update(bad.reason for bad in chunk.bad_records)
        self.removed_characters.update(chunk.removed_characters)

    def drop(self, dropped: Dropped, chunk: StagedChunk) -> None:
        """A document of a chunk; before the chunk's records are added."""
        stage = self.stages[dropped.stage]
        stage.documents += 1
        stage.words += dropped.words
        stage.reasons[dropped.reason] += 1
        record = self.sources[chunk.source].records + dropped.record + 1
        self.sample.add(dropped, self.recipe.sources[chunk.source].name, record, chunk.path)


def check_counts(counts: CorpusCounts, unchecked: Sequence[str]) -> list[dict[str, Any]]:
    """Every expectation of every source beside what was found; `unchecked` names sources that are not the published
    ones, whose counts prove nothing."""
    checks = []
    for source, found in zip(counts.recipe.sources, counts.sources, strict=True):
        for expected in expectations(source, counts.recipe.language):
            number = found.measured(expected.measure)
            checked = source.name not in unchecked
            near = abs(number - expected.count) <= expected.tolerance * expected.count
            check = {"source": source.name, **expected.model_dump(mode="json"), "found": number, "checked": checked}
            checks.append(check | {"met": near or not checked})
    return checks


def corpus_report(
    counts: CorpusCounts, parts: Sequence[Sequence[Part]], checks: Sequence[dict[str, Any]], facts: dict[str, Any]
) -> dict[str, Any]:
    """The object of corpus.json; `facts` (build key, library versions) go in first."""
    recipe = counts.recipe
    sources = zip(recipe.sources, counts.sources, parts, strict=True)
    return {
        "format": CORPUS_FORMAT,
        "version": CORPUS_VERSION,
        "name": recipe.name,
        **facts,
        "sources": [_source_report(source, found, files) for source, found, files in sources],
        "stages": _stage_reports(counts),
        "expected": list(checks),
        "blend": recipe.blend,
    }


def _amount(amount: Amount) -> dict[str, int]:
    return {"documents": amount.documents, "words": amount.words, "bytes": amount.num_bytes}


def _source_report(source: CorpusSource, found: SourceCounts, files: Sequence[Part]) -> dict[str, Any]:
    return {
        "name": source.name,
        "input": source.input,
        "status": source.status,
        "weight": source.weight,
        "epochs": source.epochs,
        "records": found.records,
        "unreadable": dict(sorted(found.unreadable.items())),
        "read": _amount(found.read),
        "written": _amount(found.written),
        "files": [
            {"name": part.name, "documents": part.documents, "bytes": part.num_bytes, "sha256": part.sha256}
            for part in files
        ],
    }


def _stage_reports(counts: CorpusCounts) -> list[dict[str, Any]]:
    """Cleaning, then every stage that is on, in order, with the documents that reached it."""
    reports: list[dict[str, Any]] = []
    cleaned = {source.name: list(source.clean) for source in counts.recipe.sources if source.clean}
    if cleaned:
        removed = {rule: counts.removed_characters[rule] for rule in sorted(counts.removed_characters)}
        reports.append({"stage": "cleaning", "settings": cleaned, "removed_characters": removed})
    settings = active_stages(counts.recipe.filters)
    written = sum(source.written.documents for source in counts.sources)
    remaining = written + sum(stage.documents for stage in counts.stages.values())
    for name, stage in counts.stages.items():
        reports.append(
            {
                "stage": name,
                "settings": settings.get(name, {}),
                "documents_in": remaining,
                "dropped_documents": stage.documents,
                "dropped_words": stage.words,
                "reasons": dict(sorted(stage.reasons.items())),
            }
        )
        remaining -= stage.documents
    return reports


def read_report(directory: Path) -> dict[str, Any] | None:
    """The corpus.json of a folder; None where there is none. Raises DataError where it is damaged."""
    path = directory / REPORT_NAME
    if not path.is_file():
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error}); the file is damaged, prepare the corpus again") from error
    if not isinstance(report, dict) or report.get("format") != CORPUS_FORMAT:
        return None
    if report.get("version") != CORPUS_VERSION or not isinstance(report.get("stages"), list):
        raise DataError(
            f"{path}: version {report.get('version')!r} of a corpus report, this is {CORPUS_VERSION}; prepare it again"
        )
    return report


def cleaning_record(inputs: Sequence[str]) -> list[dict[str, Any]]:
    """What tools/prepare_corpus.py did to `inputs` (paths and globs): one object a stage, folder after folder.

    A folder counts once, however many of its files are named; inputs that it did not write add nothing.
    """
    record: list[dict[str, Any]] = []
    for folder in dict.fromkeys(Path(path).resolve().parent for name in inputs for path in _paths(name)):
        report = read_report(folder)
        if report is not None:
            record += [{"corpus": report.get("name"), **stage} for stage in report["stages"]]
    return record


def _paths(name: str) -> list[str]:
    if "://" in name:
        return []
    return [name] if Path(name).exists() else sorted(glob.glob(name, recursive=True))
