"""A corpus prepared: read, cleaned and filtered in worker processes, duplicates dropped in order, written in parts.

In: a data recipe. Out: a folder with SOURCE-00000.jsonl.zst ..., corpus.json, dropped.jsonl, errors.jsonl, blend.yaml,
complete or absent, the same bytes for any number of workers. Memory: the chunks in flight, the held-out table, and
what the duplicate stages remember (duplicates.py); without them it does not grow with the corpus. An interrupted run
starts anew: what the duplicate stages remember is most of the work.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import is_full_disk, output_folder
from ctxlm_ds.console import ByteProgress, byte_progress
from ctxlm_ds.data.hygiene.corpora import CorpusRecipe, blend_text
from ctxlm_ds.data.hygiene.duplicates import ExactIndex, NearIndex, Signatures, require_rensa
from ctxlm_ds.data.hygiene.held_out import build_held_out_table, held_out_sources
from ctxlm_ds.data.hygiene.quality import LanguageIdentifier
from ctxlm_ds.data.hygiene.record import EXCERPT_CHARACTERS, Dropped, Kept, PartWriter, StagedChunk, active_stages
from ctxlm_ds.data.hygiene.report import REPORT_NAME, CorpusCounts, check_counts, corpus_report, read_report
from ctxlm_ds.data.hygiene.stages import build_stager
from ctxlm_ds.data.preprocess.pool import ordered_map, stop_signals_interrupt
from ctxlm_ds.data.preprocess.records import BadRecords
from ctxlm_ds.data.sources.reading import check_keys, find_sources, read_chunks, source_signature, total_bytes
from ctxlm_ds.data.sources.types import Chunk, Source
from ctxlm_ds.errors import DataError

logger = logging.getLogger("ctxlm_ds")

STAGES_VERSION = 2
"""Raised when a stage drops other documents than before under the same settings."""
DROPPED_NAME = "dropped.jsonl"
ERRORS_NAME = "errors.jsonl"
BLEND_NAME = "blend.yaml"
_HELD_OUT_NAME = "held-out.npy"
_SIGNATURES_NAME = "signatures.u32"
_UNKNOWN_SIZE_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """How a corpus is prepared; only what changes the result takes part in its build key."""

    workers: int = 1
    overwrite: bool = False
    max_bad_records: int | float = 0
    """Records that may be skipped because they are no documents; a float is a share of all records."""
    limit_bytes: int | None = None
    """Read about so much text of each source, to try a recipe."""
    part_bytes: int = 512_000_000
    """Text in a file, before compression."""
    replaced: tuple[str, ...] = ()
    """Sources whose files are not the published ones; their counts are not checked."""


@dataclass(frozen=True, slots=True)
class PrepareResult:
    """A prepared corpus."""

    directory: Path
    report: dict[str, Any]
    seconds: float
    """0 where it was complete already."""


def prepare_corpus(recipe: CorpusRecipe, directory: Path, options: PrepareOptions) -> PrepareResult:
    """Write the corpus of a recipe, or find it complete already.

    Raises DataError for unreadable input, more bad records than allowed, a missing library, a full disk, or a folder
    that holds something else; nothing is left behind then.
    """
    if options.workers < 1:
        raise DataError(f"--workers {options.workers}: at least 1 is needed")
    sources = [find_sources(source.input, source.input_format) for source in recipe.sources]
    for source, files in zip(recipe.sources, sources, strict=True):
        check_keys(files, source.json_keys)
    _require_libraries(recipe)
    build_key = _build_key(recipe, sources, options)
    finished = None if options.overwrite else _finished(directory, build_key)
    if finished is not None:
        return PrepareResult(directory, finished, 0.0)
    run = _Run(recipe, sources, options)
    start_s = time.monotonic()
    try:
        with stop_signals_interrupt(), output_folder(directory) as folder:
            report = run.write(folder, {"build_key": build_key, "libraries": _library_versions(recipe)})
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise DataError(
            f"{directory.parent}: {error.strerror}; nothing was kept, free some space or choose another --output-dir"
        ) from error
    return PrepareResult(directory, report, time.monotonic() - start_s)


def _finished(directory: Path, build_key: str) -> dict[str, Any] | None:
    """The report of a folder that holds exactly this corpus; None where there is no folder. Raises DataError."""
    if not directory.exists():
        return None
    report = read_report(directory) if directory.is_dir() else None
    if report is not None and report.get("build_key") == build_key:
        files = [part for source in report["sources"] for part in source["files"]]
        sizes = {path.name: path.stat().st_size for path in directory.iterdir() if path.is_file()}
        changed = [part["name"] for part in files if sizes.get(part["name"]) != part["bytes"]]
        if not changed:
            return report
        raise DataError(f"{directory / changed[0]}: missing or changed since it was made; --overwrite makes it anew")
    raise DataError(
        f"{directory}: exists and is not this corpus (other input or settings); "
        "--overwrite replaces it, or choose another --output-dir"
    )


def _require_libraries(recipe: CorpusRecipe) -> None:
    """What workers would miss is missed here, before anything is read."""
    stages = active_stages(recipe.filters)
    if "near_duplicates" in stages:
        require_rensa()
    if "language" in stages:
        LanguageIdentifier(recipe.filters.languages)


def _library_versions(recipe: CorpusRecipe) -> dict[str, str]:
    """Libraries that decide which documents stay."""
    stages = active_stages(recipe.filters)
    names = [name for stage, name in (("language", "py3langid"), ("near_duplicates", "rensa")) if stage in stages]
    return {name: importlib.metadata.version(name) for name in names}


def _build_key(recipe: CorpusRecipe, sources: Sequence[Sequence[Source]], options: PrepareOptions) -> str:
    named_by_signature: Any = {"sources": {"__all__": {"input", "note"}}, "filters": {"decontaminate"}}
    included = {"language", "sources", "filters", "blend"}
    settings = recipe.model_dump(mode="json", include=included, exclude=named_by_signature)
    held_out = held_out_sources(recipe.filters.decontaminate) if recipe.filters.decontaminate else []
    facts = [
        STAGES_VERSION,
        settings,
        [source_signature(files) for files in (*sources, held_out) if files],
        [options.limit_bytes, options.part_bytes, sorted(options.replaced)],
        _library_versions(recipe),
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class _Run:
    """The main process's side: reads, decides duplicates in order, writes, counts."""

    def __init__(self, recipe: CorpusRecipe, sources: Sequence[Sequence[Source]], options: PrepareOptions) -> None:
        self.recipe = recipe
        self.sources = sources
        self.options = options
        self.counts = CorpusCounts(recipe)
        self._bad_records = BadRecords(options.max_bad_records)
        self._shown_s = time.monotonic()
        self._exact = ExactIndex() if recipe.filters.exact_duplicates else None
        self._near: NearIndex | None = None

    def write(self, folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
        """Fill the folder; the object of its corpus.json."""
        filters = self.recipe.filters
        held_out = folder / _HELD_OUT_NAME if filters.decontaminate else None
        if held_out:
            facts = facts | {"held_out": self._build_held_out(held_out)}
        if filters.near_duplicates:
            near_path, slots = folder / _SIGNATURES_NAME, filters.near_duplicate_permutations
            self._near = NearIndex(near_path, filters.near_duplicate_threshold, slots)
        try:
            writers = [PartWriter(folder, source.name, self.options.part_bytes) for source in self.recipe.sources]
            self._consume(held_out, writers)
        finally:
            if self._near is not None:
                self._near.close()
        if held_out:
            held_out.unlink()
        partial_run = self.options.limit_bytes is not None
        unchecked = [source.name for source in self.recipe.sources] if partial_run else self.options.replaced
        checks = check_counts(self.counts, unchecked)
        report = corpus_report(self.counts, [writer.parts for writer in writers], checks, facts)
        lines = "".join(f"{line}\n" for line in self.counts.sample.lines(self.counts.stages))
        (folder / DROPPED_NAME).write_text(lines, encoding="utf-8")
        (folder / ERRORS_NAME).write_text(self._bad_records.error_lines(), encoding="utf-8")
        kept = [source.name for source, writer in zip(self.recipe.sources, writers, strict=True) if writer.parts]
        if kept:
            (folder / BLEND_NAME).write_text(blend_text(self.recipe, kept), encoding="utf-8")
        (folder / REPORT_NAME).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        for writer in writers:
            writer.publish()
        return report

    def _build_held_out(self, path: Path) -> dict[str, int]:
        size = self.recipe.filters.decontamination_ngram
        counts = build_held_out_table(self.recipe.filters.decontaminate, ("text",), size, path)
        if counts.too_short:
            logger.warning(
                "%d of %d held-out documents have fewer than %d words: training data is not searched for them",
                counts.too_short,
                counts.documents,
                size,
            )
        return {"documents": counts.documents, "too_short": counts.too_short, "ngrams": counts.ngrams}

    def _consume(self, held_out: Path | None, writers: Sequence[PartWriter]) -> None:
        build = partial(build_stager, self.recipe, held_out)
        total = sum(total_bytes(files) for files in self.sources)
        with byte_progress("prepare", total) as progress:
            for chunk in ordered_map(build, self._chunks(), self.options.workers):
                self._take(chunk, writers[chunk.source])
                for bad in chunk.bad_records:
                    self._bad_records.add(bad, self.counts.records)
                self._show(progress, chunk)
        self._bad_records.check(self.counts.records)
        for writer in writers:
            writer.close()

    def _chunks(self) -> Iterator[tuple[int, Chunk]]:
        limit = sys.maxsize if self.options.limit_bytes is None else self.options.limit_bytes
        for number, (source, files) in enumerate(zip(self.recipe.sources, self.sources, strict=True)):
            text_bytes = 0
            for chunk in read_chunks(files, source.json_keys):
                yield number, chunk
                text_bytes += _text_size(chunk.records)
                if text_bytes >= limit:
                    break

    def _take(self, chunk: StagedChunk, writer: PartWriter) -> None:
        """Write the documents of a chunk that no earlier one stands for."""
        written = self.counts.sources[chunk.source].written
        for index, kept in enumerate(chunk.kept):
            dropped = self._duplicate(chunk, index, kept)
            if dropped:
                self.counts.drop(dropped, chunk)
            else:
                writer.write(kept.line)
                written.add(kept.words, kept.num_bytes)
        self.counts.add_chunk(chunk)

    def _duplicate(self, chunk: StagedChunk, index: int, kept: Kept) -> Dropped | None:
        stage, reason, original = "", "", None
        if self._exact is not None and self._exact.seen(kept.print):
            stage, reason = "exact_duplicates", "the same words as an earlier document"
        elif self._near is not None and chunk.signatures is not None:
            original = self._nearly_equal(self._near, chunk.signatures[index], kept)
            if original is not None:
                stage, reason, original = "near_duplicates", "nearly the same as an earlier document", original + 1
        if not stage:
            return None
        excerpt = json.loads(kept.line)["text"][:EXCERPT_CHARACTERS]
        return Dropped(stage, reason, kept.words, kept.record, excerpt, original)

    @staticmethod
    def _nearly_equal(index: NearIndex, signature: Signatures, kept: Kept) -> int | None:
        if kept.has_words:
            return index.duplicate_of(signature)
        index.pass_over(signature)
        return None

    def _show(self, progress: ByteProgress, chunk: StagedChunk) -> None:
        written = sum(source.written.documents for source in self.counts.sources)
        note = f"({self.counts.records:,} records, {written:,} documents kept)"
        if any(file.num_bytes for files in self.sources for file in files):
            before = sum(total_bytes(files) for files in self.sources[: chunk.source])
            progress.update(before + chunk.bytes_read, note)
        elif time.monotonic() - self._shown_s >= _UNKNOWN_SIZE_INTERVAL_S:
            self._shown_s = time.monotonic()
            logger.info("prepare: %s", note)


def _text_size(records: bytes | list[dict[str, Any]]) -> int:
    """Bytes, or characters where rows hold text; files' tables give it undecoded."""
    if isinstance(records, bytes):
        return len(records)
    return sum(len(value) for row in records for value in row.values() if isinstance(value, (str, bytes)))
