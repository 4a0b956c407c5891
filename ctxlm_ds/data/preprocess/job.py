"""Turn documents into indexed datasets: read, split and tokenize in worker processes, write in order.

The result, `{prefix}_{key}_{sentence|document}.{bin,idx,json,sha256}` and `.errors.jsonl` for skipped records, has the
same bytes for any number of workers and of interruptions. Memory is bounded by the chunks in flight (two per worker, a
megabyte each) and the words that a worker remembers (120 MB). An interrupted run resumes from its last saved progress
(folder.py); a finished dataset of the same build is not built again.
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
from ctxlm_ds.data.preprocess.sentences import SPLITTER_VERSION
from ctxlm_ds.data.sources.bad_records import BadRecords
from ctxlm_ds.data.sources.reading import check_keys, find_sources, read_chunks, source_signature, total_bytes
from ctxlm_ds.data.sources.types import Position, Source
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
    """True if it existed already, from the same input, settings and tokenizer."""


def preprocess(
    inputs: Sequence[str], tokenizer_path: str | Path, output_prefix: str | Path, config: PreprocessConfig
) -> list[PreprocessResult]:
    """Write one dataset per key; all are complete, or none exists.

    Args:
        inputs: files, globs and `hf://` names.
        tokenizer_path: folder of the tokenizer.
        output_prefix: path of the datasets without key and extension.
        config: how documents become a dataset.

    Raises:
        DataError: unreadable input, too many bad records, existing output of another build, another process that
            writes it, or a full disk.
        TokenizerError: an unfit tokenizer.
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
            # Other keys of the same input have other locks. A .bin gets its name first: until ours has its name,
            # existing files are another run's.
            if part_file(folder.path, prefix, "bin").exists():
                refuse_existing(prefix, config.overwrite)
        for prefix in prefixes:
            publish_parts(prefix, folder.path)
    seconds = time.monotonic() - start_s
    return [PreprocessResult(prefix, _read_json(prefix), seconds) for prefix in prefixes]


def _complete_datasets(prefixes: Sequence[str], key: str, config: PreprocessConfig) -> list[PreprocessResult]:
    """Return the finished datasets of this build; none if any is missing, damaged or of another build."""
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
        raise KeyboardInterrupt(f"{folder.path} is kept: rerun the command to resume") from None
    except OSError as error:
        if not is_full_disk(error):
            raise
        kept = f"{folder.path} is kept, rerun the command to resume" if folder.is_kept else "nothing was kept"
        raise DataError(
            f"{folder.path.parent}: {error.strerror} after {job.counts['input_bytes'] / 1e6:.1f} MB of input; "
            f"{kept}; free some space or choose another --output-prefix"
        ) from error
    except DataError:
        if folder.is_kept:
            logger.warning("%s is kept: rerun the command to resume once the cause is removed", folder.path)
        raise


class _Job:
    """One run: counts what passes, writes it, and saves its progress."""

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
        """Write every dataset into `folder`, continuing behind `progress`, until only the names are missing."""
        with ExitStack() as stack:
            try:
                writers = self._open_writers(stack, folder, progress)
            except DamagedPartsError as error:
                logger.warning("%s; starting again", error)
                folder.clear()
                progress = None
                writers = self._open_writers(stack, folder, progress)
            if progress is not None:
                self.counts = dict(progress.counts)
                self.bad_records.restore(progress.bad_records)
                logger.info("resuming after %.1f MB of input (%s)", self.counts["input_bytes"] / 1e6, folder.path)
            position = self._consume(folder, progress, writers)
            self._check_end(writers)
            metadata = self._metadata(inputs, folder.build_key)
            for writer, key in zip(writers, self.config.json_keys, strict=True):
                writer.prepare(metadata | {"json_key": key}, self.bad_records.error_lines())
            self._save(folder, writers, position, is_prepared=True)

    def _open_writers(
        self, stack: ExitStack, folder: PartialFolder, progress: Progress | None
    ) -> list[IndexedDatasetWriter]:
        dtype = token_dtype(self.tokenizer.vocab_size)
        states = progress.writers if progress is not None else [None] * len(self.prefixes)
        return [
            stack.enter_context(IndexedDatasetWriter(prefix, dtype, self.config.overwrite, folder.path, state))
            for prefix, state in zip(self.prefixes, states, strict=True)
        ]

    def _consume(
        self, folder: PartialFolder, progress: Progress | None, writers: list[IndexedDatasetWriter]
    ) -> Position:
        """Write all chunks and return the position behind the last."""
        position = None if progress is None else progress.position
        build = partial(build_encoder, str(self.tokenizer_path), self.config)
        chunks = ordered_map(
            build, read_chunks(self.sources, self.config.json_keys, self.config.shard, position), self.config.workers
        )
        saved_bytes, saved_s = self.counts["input_bytes"], time.monotonic()
        with ExitStack() as stack:
            # The pool ends before the progress display does: it may still log a worker's death.
            num_bytes = total_bytes(self.sources, self.config.shard)
            progress_bar = byte_progress("preprocess", num_bytes)
            update = stack.enter_context(progress_bar).update if num_bytes else _log_at_times()
            stack.callback(getattr(chunks, "close", lambda: None))
            for chunk in chunks:
                self._count(chunk)
                for writer, encoded in zip(writers, chunk.keys, strict=True):
                    writer.add_documents(encoded.tokens, encoded.lengths, encoded.document_sizes)
                documents, tokens = writers[0].num_documents, writers[0].num_tokens
                update(chunk.bytes_read, f"{counted(documents, 'document')}, {tokens / 1e6:.1f} M tokens")
                position = chunk.position
                if chunk.bytes_read - saved_bytes >= PIECE_BYTES or time.monotonic() - saved_s >= PIECE_S:
                    self._save(folder, writers, position)
                    saved_bytes, saved_s = chunk.bytes_read, time.monotonic()
        self.counts["input_bytes"] = num_bytes or self.counts["input_bytes"]
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
            "sentence_splitter": SPLITTER_VERSION if config.split_sentences else None,
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
    """Return the name without its folder, which is not in the signature either; it may have any bytes."""
    name = source.path if source.format == "hf" else os.path.basename(source.path)
    return name.encode("utf-8", "replace").decode("utf-8")


def _log_at_times() -> Callable[[int, str], None]:
    """Return a substitute for a progress display, for input of unknown size (hf://)."""
    last_s = [time.monotonic()]

    def log(bytes_read: int, note: str) -> None:
        if time.monotonic() - last_s[0] >= _UNKNOWN_SIZE_INTERVAL_S:
            last_s[0] = time.monotonic()
            logger.info("preprocess: %s", note)

    return log
