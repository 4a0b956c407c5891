"""Documents to indexed datasets: read, split, tokenize in worker processes, write in order.

In: corpus files and a tokenizer folder. Out: `{prefix}_{key}_{sentence|document}.{bin,idx,json,sha256}` and, where
records were skipped, `.errors.jsonl`; the same bytes for any number of workers and of interruptions. Memory is bounded
by the chunks in flight (two a worker, a megabyte each) and the words a worker remembers (120 MB). An interrupted run
goes on at its last finished piece (folder.py); a finished dataset of the same build is not built again.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import is_full_disk
from ctxlm_ds.console import byte_progress, counted
from ctxlm_ds.data.dataset.reader import IndexedDataset, dataset_file, token_dtype
from ctxlm_ds.data.dataset.writer import (
    DamagedPartsError,
    IndexedDatasetWriter,
    part_file,
    publish_parts,
    refuse_existing,
)
from ctxlm_ds.data.preprocess.config import BUILD_VERSION, PreprocessConfig, build_key, dataset_prefix
from ctxlm_ds.data.preprocess.encode import EncodedChunk, build_encoder, encoded_prefix
from ctxlm_ds.data.preprocess.folder import PartialFolder, Progress
from ctxlm_ds.data.preprocess.pool import ordered_map, stop_signals_interrupt
from ctxlm_ds.data.preprocess.records import BadRecords
from ctxlm_ds.data.sources.reading import (
    Position,
    Source,
    check_keys,
    find_sources,
    read_chunks,
    source_signature,
    total_bytes,
)
from ctxlm_ds.errors import DataError
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer

logger = logging.getLogger("ctxlm_ds")

PIECE_BYTES = 64 << 20
"""Input after which progress is saved."""
PIECE_S = 30.0
"""Time after which progress is saved."""
_UNKNOWN_SIZE_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class PreprocessResult:
    """One finished dataset."""

    prefix: str
    metadata: dict[str, Any]
    seconds: float
    was_complete: bool = False
    """It was there already, from the same input, settings and tokenizer."""


def preprocess(
    inputs: Sequence[str], tokenizer_path: str | Path, output_prefix: str | Path, config: PreprocessConfig
) -> list[PreprocessResult]:
    """Write one dataset a key; every one is complete, or none exists.

    Raises DataError for unreadable input, more bad records than allowed, existing output of another build, a run that
    writes it at this moment or a full disk, and TokenizerError for an unfit tokenizer.
    """
    if config.workers < 1:
        raise DataError(f"--workers {config.workers}: at least 1 is needed")
    start_s = time.monotonic()
    sources = find_sources(inputs, config.input_format)
    check_keys(sources, config.json_keys)
    tokenizer = load_tokenizer(tokenizer_path, config.split_special_tokens or None)
    config = replace(config, split_special_tokens=tokenizer.split_special_tokens)
    prefixes = [dataset_prefix(output_prefix, key, config) for key in config.json_keys]
    signature = source_signature(sources)
    key = build_key(signature, tokenizer.fingerprint, config)
    folder = PartialFolder(prefixes[0], key)
    if not folder.path.exists() and (complete := _complete_datasets(prefixes, key, config)):
        return complete
    job = _Job(config, tokenizer, Path(tokenizer_path), sources, signature, prefixes)
    with folder, stop_signals_interrupt(), _explained(folder, job):
        if complete := _complete_datasets(prefixes, key, config):
            return complete
        progress = folder.load()
        if progress is None or not progress.is_prepared:
            for prefix in prefixes:
                refuse_existing(prefix, config.overwrite)
            job.write(folder, progress, inputs)
        folder.check()
        for prefix in prefixes:
            # Other keys of the same input are locked apart from these. A .bin gets its name first: while ours has none,
            # what is there is another's.
            if part_file(folder.path, prefix, "bin").exists():
                refuse_existing(prefix, config.overwrite)
        for prefix in prefixes:
            publish_parts(prefix, folder.path)
    seconds = time.monotonic() - start_s
    return [PreprocessResult(prefix, _read_json(prefix), seconds) for prefix in prefixes]


def _complete_datasets(prefixes: Sequence[str], key: str, config: PreprocessConfig) -> list[PreprocessResult]:
    """The finished datasets of this build; empty where any is missing, damaged or another one."""
    if config.overwrite or not all(dataset_file(prefix, "idx").exists() for prefix in prefixes):
        return []
    try:
        found = [IndexedDataset(prefix).metadata or {} for prefix in prefixes]
    except DataError:
        return []
    if any(metadata.get("build_key") != key for metadata in found):
        return []
    return [PreprocessResult(prefix, metadata, 0.0, True) for prefix, metadata in zip(prefixes, found, strict=True)]


def _read_json(prefix: str) -> dict[str, Any]:
    metadata: dict[str, Any] = json.loads(dataset_file(prefix, "json").read_text(encoding="utf-8"))
    return metadata


@contextmanager
def _explained(folder: PartialFolder, job: _Job) -> Iterator[None]:
    """Say what an interrupted or failed run leaves behind."""
    try:
        yield
    except KeyboardInterrupt:
        if not folder.is_kept:
            raise
        raise KeyboardInterrupt(f"{folder.path} is kept: the same command goes on from there") from None
    except OSError as error:
        if not is_full_disk(error):
            raise
        kept = f"{folder.path} is kept and gone on with" if folder.is_kept else "nothing was kept"
        raise DataError(
            f"{folder.path.parent}: {error.strerror} after {job.counts['input_bytes'] / 1e6:.1f} MB of input; "
            f"{kept}, free some space or choose another --output-prefix"
        ) from error
    except DataError:
        if folder.is_kept:
            logger.warning("%s is kept: the same command goes on from there once the cause is gone", folder.path)
        raise


class _Job:
    """Counts what passes, writes it, and saves how far it has come."""

    def __init__(
        self,
        config: PreprocessConfig,
        tokenizer: Tokenizer,
        tokenizer_path: Path,
        sources: Sequence[Source],
        signature: str,
        prefixes: Sequence[str],
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.tokenizer_path = tokenizer_path
        self.sources = sources
        self.signature = signature
        self.prefixes = prefixes
        self.bad_records = BadRecords(config.max_bad_records)
        self.counts = dict.fromkeys(("input_bytes", "characters", "empty_documents", "records"), 0)

    def write(self, folder: PartialFolder, progress: Progress | None, inputs: Sequence[str]) -> None:
        """Write every dataset into `folder`, behind what `progress` counts, up to where only the names are missing."""
        with ExitStack() as stack:
            try:
                writers = self._open_writers(stack, folder, progress)
            except DamagedPartsError as error:
                logger.warning("%s; starting anew", error)
                folder.clear()
                progress = None
                writers = self._open_writers(stack, folder, progress)
            if progress is not None:
                self.counts = dict(progress.counts)
                self.bad_records.restore(progress.bad_records)
                logger.info("going on after %.1f MB of input (%s)", self.counts["input_bytes"] / 1e6, folder.path)
            position = self._consume(folder, progress, writers)
            self._check_end(writers)
            keyed = zip(writers, self.config.json_keys, strict=True)
            metadata = self._metadata(inputs, folder.build_key)
            for writer, key in keyed:
                writer.prepare(metadata | {"json_key": key}, self.bad_records.error_lines())
            self._save(folder, writers, position, is_prepared=True)

    def _open_writers(
        self, stack: ExitStack, folder: PartialFolder, progress: Progress | None
    ) -> list[IndexedDatasetWriter]:
        dtype = token_dtype(self.tokenizer.vocab_size)
        states = progress.writers if progress is not None else [None] * len(self.prefixes)
        with ExitStack() as opened:
            writers = [
                opened.enter_context(IndexedDatasetWriter(prefix, dtype, self.config.overwrite, folder.path, state))
                for prefix, state in zip(self.prefixes, states, strict=True)
            ]
            stack.push(opened.pop_all())
        return writers

    def _consume(
        self, folder: PartialFolder, progress: Progress | None, writers: list[IndexedDatasetWriter]
    ) -> Position:
        """Write all chunks; the position behind the last."""
        position = None if progress is None else progress.position
        build = partial(build_encoder, str(self.tokenizer_path), self.config)
        chunks = ordered_map(
            build, read_chunks(self.sources, self.config.json_keys, self.config.shard, position), self.config.workers
        )
        saved_bytes, saved_s = self.counts["input_bytes"], time.monotonic()
        with ExitStack() as stack:
            # The pool ends before the progress display does: it may still log a worker's death.
            report = stack.enter_context(_Reporter(total_bytes(self.sources, self.config.shard)))
            stack.callback(getattr(chunks, "close", lambda: None))
            for chunk in chunks:
                self._count(chunk)
                for writer, encoded in zip(writers, chunk.keys, strict=True):
                    writer.add_documents(encoded.tokens, encoded.lengths, encoded.document_sizes)
                report(chunk.bytes_read, writers[0].num_documents, writers[0].num_tokens)
                position = chunk.position
                if chunk.bytes_read - saved_bytes >= PIECE_BYTES or time.monotonic() - saved_s >= PIECE_S:
                    self._save(folder, writers, position)
                    saved_bytes, saved_s = chunk.bytes_read, time.monotonic()
        self.counts["input_bytes"] = total_bytes(self.sources, self.config.shard) or self.counts["input_bytes"]
        return position or Position(0)

    def _save(
        self, folder: PartialFolder, writers: list[IndexedDatasetWriter], position: Position, is_prepared: bool = False
    ) -> None:
        states = [writer.save() for writer in writers]
        bad_records = self.bad_records.to_json()
        folder.save(Progress(folder.build_key, position, states, self.counts, bad_records, is_prepared))

    def _count(self, chunk: EncodedChunk) -> None:
        self.counts["input_bytes"] = chunk.bytes_read
        self.counts["characters"] += chunk.characters
        self.counts["empty_documents"] += chunk.empty_documents
        self.counts["records"] += chunk.records
        for bad in chunk.bad_records:
            self.bad_records.add(bad, self.counts["records"])

    def _check_end(self, writers: list[IndexedDatasetWriter]) -> None:
        self.bad_records.check(self.counts["records"])
        if any(writer.num_sequences for writer in writers):
            return
        found = f"{self.counts['empty_documents']} empty documents, {self.bad_records.count} bad records"
        if self.config.shard.count == 1:
            raise DataError(f"the input holds no text ({found}); check --input and --json-keys")
        logger.warning("shard %d holds no text (%s): an empty dataset", self.config.shard.index, found)

    def _metadata(self, inputs: Sequence[str], key: str) -> dict[str, Any]:
        from ctxlm_ds.data.hygiene.report import cleaning_record  # brings pydantic

        config = self.config
        return {
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
            "tokenizer_path": str(self.tokenizer_path.resolve()),
            "tokenizer_kind": self.tokenizer.kind,
            "vocab_size": self.tokenizer.vocab_size,
            "eod_id": self.tokenizer.sep_id,
            "sentence_prefix": encoded_prefix(self.config, self.tokenizer),
            "split_sentences": config.split_sentences,
            "keep_newlines": config.keep_newlines,
            "append_eod": config.append_eod,
            "split_special_tokens": config.split_special_tokens,
            "shard": [config.shard.index, config.shard.count],
            "build_key": key,
            "empty_documents": self.counts["empty_documents"],
            "bad_records": self.bad_records.count,
            "bad_record_reasons": dict(sorted(self.bad_records.reasons.items())),
            "cleaning": cleaning_record(inputs),
            "inputs": list(inputs),
            "sources": [_source_name(source) for source in self.sources],
            "source_signature": self.signature,
            "input_format": config.input_format,
            "json_keys": list(config.json_keys),
            "build_version": BUILD_VERSION,
            "input_bytes": self.counts["input_bytes"],
            "characters": self.counts["characters"],
        }


def _source_name(source: Source) -> str:
    """Without its folder, which the signature does not know either; text, whatever bytes the name has."""
    name = source.path if source.format == "hf" else os.path.basename(source.path)
    return name.encode("utf-8", "replace").decode("utf-8")


class _Reporter(ExitStack):
    """Progress by bytes read; by documents where the size of the input is unknown (hf://)."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._update: Callable[[int, str], None] | None = None
        if num_bytes:
            self._update = self.enter_context(byte_progress("preprocess", num_bytes)).update
        self._last_s = time.monotonic()

    def __call__(self, bytes_read: int, documents: int, tokens: int) -> None:
        note = f"{counted(documents, 'document')}, {tokens / 1e6:.1f} M tokens"
        if self._update is not None:
            self._update(bytes_read, note)
        elif time.monotonic() - self._last_s >= _UNKNOWN_SIZE_INTERVAL_S:
            self._last_s = time.monotonic()
            logger.info("preprocess: %s", note)
