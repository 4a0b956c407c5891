"""Prepare a corpus: read, clean and filter in worker processes, drop duplicates in order, write in parts.

The folder has SOURCE-00000.jsonl.zst ..., corpus.json, dropped.jsonl, errors.jsonl and blend.yaml. It is complete or
absent, and has the same bytes for any number of workers. Memory: the chunks in flight, and what the duplicate stages
remember. An interrupted run starts again, because what these remember is most of the work.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import logging
import math
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import zstandard

from ctxlm_ds.atomic import is_full_disk, output_folder
from ctxlm_ds.console import byte_progress
from ctxlm_ds.data.dataset.checksums import file_digest
from ctxlm_ds.data.hygiene.cleaning import PACKAGES
from ctxlm_ds.data.hygiene.corpora import CorpusRecipe, active_stages, blend_text, required_package
from ctxlm_ds.data.hygiene.duplicates import NearIndex, held_out_sources, write_held_out
from ctxlm_ds.data.hygiene.quality import LanguageIdentifier
from ctxlm_ds.data.hygiene.report import REPORT_NAME, CorpusCounts, Part, read_report
from ctxlm_ds.data.hygiene.stages import ChunkStager, StagedChunk
from ctxlm_ds.data.preprocess.pool import ordered_map
from ctxlm_ds.data.sources.bad_records import BadRecords
from ctxlm_ds.data.sources.reading import (
    CHUNK_BYTES,
    check_keys,
    find_sources,
    read_chunks,
    source_signature,
    total_bytes,
)
from ctxlm_ds.data.sources.types import Chunk
from ctxlm_ds.errors import DataError

logger = logging.getLogger("ctxlm_ds")

STAGES_VERSION = 3
"""Increased when a stage drops other documents than before with the same settings."""
COMPRESSION_LEVEL = 3
_LIBRARIES = {"language": "py3langid", "near_duplicates": "rensa"}


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """How a corpus is prepared; only what changes the result is part of its build key."""

    workers: int = 1
    overwrite: bool = False
    max_bad_records: int = 0
    """Records without a document that may be skipped."""
    limit_bytes: int | None = None
    """Read only about this much text of each source, in complete chunks."""
    part_bytes: int = 512_000_000
    """Text per file, before compression."""
    replaced: tuple[str, ...] = ()
    """Sources whose files are not the published ones; their counts are not checked."""


def prepare_corpus(recipe: CorpusRecipe, directory: Path, options: PrepareOptions) -> dict[str, Any]:
    """Write the corpus of a recipe, or find it complete already. Returns the object of its corpus.json.

    Raises DataError for unreadable input, more bad records than allowed, a missing library, a full disk, or a folder
    that holds something else; nothing is left behind then.
    """
    if options.workers < 1:
        raise DataError(f"--workers {options.workers}: at least 1 is needed")
    run = _Run(recipe, options)
    if not options.overwrite and directory.exists():
        return _finished(directory, run.facts["build_key"])
    try:
        with output_folder(directory) as folder:
            return run.write(folder)
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise DataError(
            f"{directory.parent}: {error.strerror}; nothing was kept, free some space or choose another --output-dir"
        ) from error


def _finished(directory: Path, build_key: str) -> dict[str, Any]:
    """Return the report of an existing folder. Raises DataError if it does not hold exactly this corpus."""
    report = read_report(directory) if directory.is_dir() else None
    if report is None or report.get("build_key") != build_key:
        raise DataError(
            f"{directory}: exists and is not this corpus (other input or settings); "
            "--overwrite replaces it, or choose another --output-dir"
        )
    sizes = {path.name: path.stat().st_size for path in directory.iterdir() if path.is_file()}
    for part in (part for source in report["sources"] for part in source["files"]):
        if sizes.get(part["name"]) != part["bytes"]:
            name = directory / part["name"]
            raise DataError(f"{name}: missing or changed since it was made; --overwrite makes it again")
    logger.info("%s: complete already, nothing to do", directory)
    return report


class _PartWriter:
    """The documents of one source, written to numbered files; a source without documents has none."""

    def __init__(self, directory: Path, source: str, part_bytes: int) -> None:
        self._directory, self._source, self._part_bytes = directory, source, part_bytes
        self._file: Any = None
        self.parts: list[Part] = []

    def write(self, line: bytes) -> None:
        """Write one document; a part ends with the document that fills it."""
        if self._file is None:
            self._path = self._directory / f"{self._source}-{len(self.parts):05d}.jsonl.zst"
            compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, write_checksum=True)
            self._file = zstandard.open(self._path, "wb", cctx=compressor)
            self._documents = self._text_bytes = 0
        self._file.write(line)
        self._documents += 1
        self._text_bytes += len(line)
        if self._text_bytes >= self._part_bytes:
            self.close()

    def close(self) -> None:
        """Finish the current part."""
        if self._file is not None:
            self._file.close()
            self._file = None
            part = {"name": self._path.name, "documents": self._documents, "bytes": self._path.stat().st_size}
            self.parts.append(part | {"sha256": file_digest(self._path)})


class _Run:
    """The main process: reads, decides duplicates in order, writes, counts."""

    def __init__(self, recipe: CorpusRecipe, options: PrepareOptions) -> None:
        self.recipe = recipe
        self.options = options
        self.counts = CorpusCounts(recipe)
        self.sources = [find_sources(source.input, source.input_format) for source in recipe.sources]
        for source, files in zip(recipe.sources, self.sources, strict=True):
            check_keys(files, source.json_keys)
        self.facts = self._facts()
        self._bad_records = BadRecords(options.max_bad_records)
        self._prints: set[bytes] = set()
        self._near: NearIndex | None = None

    def _facts(self) -> dict[str, Any]:
        """Return the build key and the versions of libraries that decide which documents stay.

        Raises DataError for a missing library before anything is read.
        """
        filters, options = self.recipe.filters, self.options
        stages = active_stages(filters)
        if "near_duplicates" in stages:
            required_package("rensa", "--near-duplicates")
        if "language" in stages:
            LanguageIdentifier(filters.languages)
        rules = {rule for source in self.recipe.sources for rule in source.clean}.intersection(PACKAGES)
        for rule in sorted(rules):
            required_package(PACKAGES[rule], f"the cleaning rule {rule}")
        needed = [name for stage, name in _LIBRARIES.items() if stage in stages]
        needed += [name for rule, name in PACKAGES.items() if rule in rules]
        versions = {name: importlib.metadata.version(name) for name in needed}
        named_by_signature: Any = {"sources": {"__all__": {"input", "note"}}, "filters": {"decontaminate"}}
        included = {"language", "sources", "filters"}
        settings = self.recipe.model_dump(mode="json", include=included, exclude=named_by_signature)
        held_out = [held_out_sources(filters.decontaminate)] if filters.decontaminate else []
        signatures = [source_signature(files) for files in (*self.sources, *held_out)]
        limits = [options.limit_bytes, options.part_bytes, sorted(options.replaced)]
        facts = json.dumps([STAGES_VERSION, settings, signatures, limits, versions], sort_keys=True)
        return {"build_key": hashlib.sha256(facts.encode()).hexdigest(), "libraries": versions}

    def write(self, folder: Path) -> dict[str, Any]:
        """Fill the folder; return the object of its corpus.json."""
        recipe = self.recipe
        with ExitStack() as stack:
            held_out = self._write_held_out(folder, stack) if recipe.filters.decontaminate else None
            if recipe.filters.near_duplicates:
                file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
                self._near = NearIndex(file, recipe.filters.near_duplicate_threshold)
            parts = self._write_parts(folder, held_out)
        all_sources = [source.name for source in recipe.sources]
        unchecked = self.options.replaced if self.options.limit_bytes is None else all_sources
        report = self.counts.report(parts, unchecked, self.facts)
        contents = {
            "dropped.jsonl": "".join(self.counts.sample.lines()),
            "errors.jsonl": self._bad_records.error_lines(),
            REPORT_NAME: json.dumps(report, indent=1) + "\n",
        }
        kept = [name for name, files in zip(all_sources, parts, strict=True) if files]
        if kept:
            contents["blend.yaml"] = blend_text(kept)
        for name, content in contents.items():
            (folder / name).write_text(content, encoding="utf-8")
        return report

    def _write_held_out(self, folder: Path, stack: ExitStack) -> Path:
        path, size = folder / "held-out.npy", self.recipe.filters.decontamination_ngram
        stack.callback(path.unlink, missing_ok=True)
        found = write_held_out(self.recipe.filters.decontaminate, size, path)
        if found["too_short"]:
            text = "%d of %d held-out documents have fewer than %d words: training data is not searched for them"
            logger.warning(text, found["too_short"], found["documents"], size)
        self.facts["held_out"] = found
        return path

    def _write_parts(self, folder: Path, held_out: Path | None) -> list[list[Part]]:
        writers = [_PartWriter(folder, source.name, self.options.part_bytes) for source in self.recipe.sources]
        sizes = [total_bytes(files) for files in self.sources]
        counts = self.counts
        stager = partial(ChunkStager, self.recipe, held_out)
        with byte_progress("prepare", sum(sizes)) as progress:
            for chunk in ordered_map(stager, self._chunks(), self.options.workers):
                self._drop_duplicates(chunk)
                for document in chunk.documents:
                    if not document.stage:
                        writers[chunk.source].write(document.line)
                counts.add(chunk)
                for bad in chunk.bad_records:
                    self._bad_records.add(bad, counts.total("records_read"))
                note = (
                    f"({counts.total('records_read'):,} records, {counts.total('documents_written'):,} documents kept)"
                )
                progress.update(sum(sizes[: chunk.source]) + chunk.bytes_read, note)
        for writer in writers:
            writer.close()
        return [writer.parts for writer in writers]

    def _chunks(self) -> Iterator[tuple[int, Chunk]]:
        """Yield chunks with the number of their source, of each source up to the limit."""
        limit = self.options.limit_bytes
        most_chunks = None if limit is None else math.ceil(limit / CHUNK_BYTES)
        for number, (source, files) in enumerate(zip(self.recipe.sources, self.sources, strict=True)):
            for chunk in itertools.islice(read_chunks(files, source.json_keys), most_chunks):
                yield number, chunk

    def _drop_duplicates(self, chunk: StagedChunk) -> None:
        """Mark the documents of a chunk that are duplicates of an earlier one, and remember the others."""
        kept = [document for document in chunk.documents if not document.stage]
        for index, document in enumerate(kept):
            if document.print in self._prints:
                document.stage, document.reason = "exact_duplicates", "the same words as an earlier document"
                continue
            if document.print:
                self._prints.add(document.print)
            if self._near is None or chunk.signatures is None:
                continue
            original = self._near.find(chunk.signatures[index]) if document.has_words else None
            if original is None:
                self._near.add(chunk.signatures[index], document.has_words)
            else:
                document.stage, document.reason = "near_duplicates", "nearly the same as an earlier document"
                document.duplicate_of = original + 1
