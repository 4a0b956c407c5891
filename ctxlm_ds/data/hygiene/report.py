"""corpus.json: counts of each source and stage, published counts, a sample of what was dropped.

The contents have no times, so that they are the same for the same command. Imports no compiled code.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.atomic import read_object
from ctxlm_ds.data.hygiene.corpora import STAGE_SETTINGS, CorpusRecipe, active_stages
from ctxlm_ds.data.sources.types import Source

if TYPE_CHECKING:
    from ctxlm_ds.data.hygiene.stages import Judged, StagedChunk

CORPUS_FORMAT = "ctxlm_ds-corpus"
CORPUS_VERSION = 1
REPORT_NAME = "corpus.json"
SAMPLE_SIZE = 100
"""Dropped documents of each stage in dropped.jsonl."""
EMPTY_STAGE = "empty"

Part = dict[str, Any]
"""One finished file: `name`, `documents`, `bytes` on disk, `sha256`."""


class DroppedSample:
    """The dropped documents of each stage with the smallest keys: an even sample, the same in every run."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[int, int, str]]] = {}
        self._arrivals = 0

    def add(self, dropped: Judged, source: str, record: int, path: str) -> None:
        """Consider a document; `record` counts from 1 within the source."""
        key = int.from_bytes(hashlib.blake2b(f"{source}\0{record}".encode(), digest_size=8).digest(), "big")
        shown: dict[str, Any] = {"stage": dropped.stage, "reason": dropped.reason, "source": source, "record": record}
        shown["file"] = path.encode("utf-8", "replace").decode("utf-8")
        if dropped.duplicate_of is not None:
            shown["duplicate_of"] = dropped.duplicate_of
        line = json.dumps(shown | {"words": dropped.words, "text": dropped.excerpt}, ensure_ascii=False)
        heap = self._heaps.setdefault(dropped.stage, [])
        self._arrivals += 1
        heapq.heappush(heap, (-key, self._arrivals, line))
        if len(heap) > SAMPLE_SIZE:
            heapq.heappop(heap)

    def lines(self) -> Iterator[str]:
        """Yield the lines of dropped.jsonl: by stage, then in the order of the corpus."""
        for stage in (EMPTY_STAGE, *STAGE_SETTINGS):
            for _, _, line in sorted(self._heaps.get(stage, []), key=lambda entry: entry[1]):
                yield f"{line}\n"


class CorpusCounts:
    """Counts of each source, by the measures of data recipes, and of each stage."""

    def __init__(self, recipe: CorpusRecipe) -> None:
        self.recipe = recipe
        self.stages: dict[str, dict[str, object]] = {EMPTY_STAGE: {}, **active_stages(recipe.filters)}
        self.sources: list[Counter[str]] = [Counter() for _ in recipe.sources]
        self.unreadable: list[Counter[str]] = [Counter() for _ in recipe.sources]
        self.reasons: dict[str, Counter[str]] = {name: Counter() for name in self.stages}
        self.dropped_words: Counter[str] = Counter()
        self.removed_characters: Counter[str] = Counter()
        self.sample = DroppedSample()

    def total(self, measure: str) -> int:
        """Return a measure, summed over the sources."""
        return sum(counts[measure] for counts in self.sources)

    def add(self, chunk: StagedChunk) -> None:
        """Add a chunk whose documents are all decided."""
        source = self.sources[chunk.source]
        for document in chunk.documents:
            if document.stage:
                self.reasons[document.stage][document.reason] += 1
                self.dropped_words[document.stage] += document.words
                record = source["records_read"] + document.record + 1
                self.sample.add(document, self.recipe.sources[chunk.source].name, record, chunk.path)
            else:
                source.update(documents_written=1, words_written=document.words, bytes_written=document.num_bytes)
        source.update(chunk.counts)
        self.unreadable[chunk.source].update(bad.reason for bad in chunk.bad_records)
        self.removed_characters.update(chunk.removed_characters)

    def report(
        self, parts: Sequence[Sequence[Part]], unchecked: Sequence[str], facts: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the object of corpus.json from the files of each source, build key and library versions.

        `unchecked` are sources that are not the published ones, so that their counts prove nothing.
        """
        return {
            "format": CORPUS_FORMAT,
            "version": CORPUS_VERSION,
            "name": self.recipe.name,
            **facts,
            "sources": [self._source_report(number, files) for number, files in enumerate(parts)],
            "stages": list(self._stage_reports()),
            "expected": list(self._checks(unchecked)),
        }

    def _source_report(self, number: int, files: Sequence[Part]) -> dict[str, Any]:
        counts = self.sources[number]
        return {
            **self.recipe.sources[number].model_dump(include={"name", "input", "status"}),
            "records": counts["records_read"],
            "unreadable": dict(sorted(self.unreadable[number].items())),
            "read": {what: counts[f"{what}_read"] for what in ("documents", "words", "bytes")},
            "written": {what: counts[f"{what}_written"] for what in ("documents", "words", "bytes")},
            "files": list(files),
        }

    def _checks(self, unchecked: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield every published count with what was found."""
        for source, counts in zip(self.recipe.sources, self.sources, strict=True):
            checked = source.name not in unchecked
            for expected in source.expected:
                found = counts[expected.measure]
                met = abs(found - expected.count) <= expected.tolerance * expected.count or not checked
                check = {"source": source.name, **expected.model_dump(mode="json")}
                yield {**check, "found": found, "checked": checked, "met": met}

    def _stage_reports(self) -> Iterator[dict[str, Any]]:
        """Yield cleaning, then every stage that is on, in order, with the documents that reached it."""
        cleaned = {source.name: list(source.clean) for source in self.recipe.sources if source.clean}
        if cleaned:
            removed = dict(sorted(self.removed_characters.items()))
            yield {"stage": "cleaning", "settings": cleaned, "removed_characters": removed}
        remaining = self.total("documents_written") + sum(reasons.total() for reasons in self.reasons.values())
        for name, settings in self.stages.items():
            reasons = self.reasons[name]
            yield {
                "stage": name,
                "settings": settings,
                "documents_in": remaining,
                "dropped_documents": reasons.total(),
                "dropped_words": self.dropped_words[name],
                "reasons": dict(sorted(reasons.items())),
            }
            remaining -= reasons.total()


def read_report(directory: Path) -> dict[str, Any] | None:
    """Return the object of a folder's corpus.json; None if there is none, or it is another program's file."""
    report = read_object(directory / REPORT_NAME)
    is_ours = report is not None and (report.get("format"), report.get("version")) == (CORPUS_FORMAT, CORPUS_VERSION)
    return report if is_ours else None


def cleaning_record(sources: Iterable[Source]) -> list[dict[str, Any]]:
    """Return what ctxlm corpus did to files: one object per stage and folder; none for other files."""
    folders = dict.fromkeys(Path(source.path).resolve().parent for source in sources if source.format != "hf")
    reports = [report for folder in folders if (report := read_report(folder)) is not None]
    return [{"corpus": report.get("name"), **stage} for report in reports for stage in report["stages"]]
