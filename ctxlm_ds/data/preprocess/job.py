"""Turn documents into indexed datasets: read, split and tokenize in worker processes, write in order.

The result, `{prefix}_{key}_{sentence|document}.{bin,idx,json,sha256}` and `.errors.jsonl` for skipped records, has the
same bytes for any number of workers and of interruptions. Memory is bounded by the chunks in flight (two per worker, a
megabyte each) and the words that a worker remembers (120 MB). An interrupted run resumes from its last saved progress
in PREFIX.partial/, which is locked; a finished dataset of the same build is not built again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import is_full_disk, stop_signals_interrupt, write_text
from ctxlm_ds.console import byte_progress, counted, logger
from ctxlm_ds.data.dataset.inspection import MOST_UNKNOWN
from ctxlm_ds.data.dataset.reader import IndexedDataset, dataset_file, token_dtype
from ctxlm_ds.data.dataset.writer import (
    DamagedPartsError,
    IndexedDatasetWriter,
    LockedFolder,
    WriterState,
    part_file,
    publish_parts,
    refuse_existing,
)
from ctxlm_ds.data.preprocess.config import BUILD_VERSION, PreprocessConfig, build_key, dataset_keys, dataset_prefix
from ctxlm_ds.data.preprocess.encode import ChunkEncoder, EncodedChunk, encoded_prefix
from ctxlm_ds.data.preprocess.pool import ordered_map
from ctxlm_ds.data.preprocess.sentences import SPLITTER_VERSION, cut_warning
from ctxlm_ds.data.sources.corpus import BadRecords
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.reading import check_keys, find_sources, read_chunks, source_signature, total_bytes
from ctxlm_ds.data.sources.types import BadRecord, Position, Source, text_format
from ctxlm_ds.errors import DataError
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import unknown_cause

FOLDER_SUFFIX = ".partial"
PROGRESS_NAME = "progress.json"
SAVE_INTERVAL_BYTES = 64 << 20
"""Input after which progress is saved."""
SAVE_INTERVAL_S = 30.0
_LOOKED_AT = 200
"""Texts that are looked at for the cause of unknown tokens, and for what a document is."""


@dataclass(frozen=True, slots=True)
class Progress:
    """State that an interrupted run resumes from."""

    build_key: str
    position: Position
    writers: list[WriterState]
    counts: dict[str, int]
    bad_records: dict[str, Any] = field(default_factory=dict)
    is_prepared: bool = False
    """True if every file is complete and only has to get its name."""


class PartialFolder(LockedFolder):
    """Folder of an unfinished dataset; progress of another dataset than the one of `build_key` is not continued."""

    progress_name = PROGRESS_NAME

    def __init__(self, prefix: str, build_key: str) -> None:
        super().__init__(f"{prefix}{FOLDER_SUFFIX}")
        self.build_key = build_key

    def load(self) -> Progress | None:
        """Return the progress to resume from; None, and an empty folder, if there is none of this build."""
        path = self.path / PROGRESS_NAME
        try:
            value = json.loads(path.read_bytes())
            if value.pop("sha256") != _digest(value):
                raise DataError("changed since it was written")
            states = [WriterState(**state) for state in value.pop("writers")]
            progress = Progress(**(value | {"position": Position(**value["position"]), "writers": states}))
            if progress.build_key == self.build_key:
                return progress
            logger.warning("%s: holds progress of another input, tokenizer or setting; starting again", self.path)
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, KeyError, AttributeError, DataError) as error:
            logger.warning("%s: damaged (%s); starting again", path, error)
        self.clear()
        return None

    def save(self, progress: Progress) -> None:
        """Replace the progress; what it counts must be on the disk. Raises RunLockedError like `check`."""
        self.check()
        value = asdict(progress)
        write_text(self.path / PROGRESS_NAME, json.dumps(value | {"sha256": _digest(value)}))


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class PreprocessResult:
    """One finished dataset."""

    prefix: str
    metadata: dict[str, Any]
    was_complete: bool = False
    """True if it existed already, from the same input, settings and tokenizer."""


def preprocess(
    inputs: Sequence[str], tokenizer_path: str | Path, output_prefix: str | Path, config: PreprocessConfig
) -> list[PreprocessResult]:
    """Write one dataset per key; all are complete, or none exists. The inputs are files, globs and `hf://` names.

    Raises DataError for unreadable input, too many bad records, existing output of another build, another process that
    writes it, or a full disk; TokenizerError for an unfit tokenizer.
    """
    if config.workers < 1:
        raise DataError(f"--workers {config.workers}: at least 1 is needed")
    job = _Job(inputs, Path(tokenizer_path), output_prefix, config)
    folder = job.folder
    if not folder.path.exists() and (complete := job.complete_datasets()):
        return complete
    with folder, stop_signals_interrupt(), job.explained():
        if complete := job.complete_datasets():
            return complete
        progress = folder.load()
        if progress is None or not progress.is_prepared:
            for prefix in job.prefixes:
                refuse_existing(prefix, config.overwrite)
            job.write(progress)
        folder.check()
        for prefix in job.prefixes:
            # Other keys of the same input have other locks. A .bin gets its name first: until ours has its name,
            # existing files are another run's.
            if part_file(folder.path, prefix, "bin").exists():
                refuse_existing(prefix, config.overwrite)
        for prefix in job.prefixes:
            publish_parts(prefix, folder.path)
    metadata = [json.loads(dataset_file(prefix, "json").read_text(encoding="utf-8")) for prefix in job.prefixes]
    return [PreprocessResult(prefix, one) for prefix, one in zip(job.prefixes, metadata, strict=True)]


class _Job:
    """One run: the datasets to write, how far they are, and counts of what passed."""

    def __init__(
        self, inputs: Sequence[str], tokenizer_path: Path, output_prefix: str | Path, config: PreprocessConfig
    ) -> None:
        self.inputs = list(inputs)
        self.sources = find_sources(inputs, config.input_format, config.document)
        check_keys(self.sources, config.json_keys)
        _check_spans(self.sources, config)
        _check_joined(config)
        self.tokenizer = load_tokenizer(tokenizer_path, config.split_special_tokens or None)
        self.tokenizer_path = tokenizer_path
        self.config = replace(config, split_special_tokens=self.tokenizer.split_special_tokens)
        self.prefixes = [dataset_prefix(output_prefix, key, config) for key in dataset_keys(config)]
        self.signature = source_signature(self.sources)
        build = build_key(self.signature, self.tokenizer.fingerprint, self.config)
        self.folder = PartialFolder(self.prefixes[0], build)
        self.writers: list[IndexedDatasetWriter] = []
        self.position = Position()
        self.bad_records = BadRecords(config.max_bad_records)
        self.counts = dict.fromkeys(("input_bytes", "characters", "empty_documents", "records"), 0)
        self.counts |= {count: 0 for key in dataset_keys(config) for count in _counts_of(key)}

    def complete_datasets(self) -> list[PreprocessResult]:
        """Return the finished datasets of this build; none if any is missing, damaged or of another build."""
        found: list[PreprocessResult] = []
        if not self.config.overwrite and all(dataset_file(prefix, "idx").exists() for prefix in self.prefixes):
            with suppress(DataError):
                found = [PreprocessResult(one, IndexedDataset(one).metadata or {}, True) for one in self.prefixes]
        return found if all(one.metadata.get("build_key") == self.folder.build_key for one in found) else []

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say what an interrupted or failed run leaves behind."""
        path = self.folder.path
        hint = f"{path} is kept: rerun the command to resume"
        try:
            yield
        except KeyboardInterrupt:
            raise KeyboardInterrupt(hint if self.folder.is_kept else "") from None
        except OSError as error:
            if not is_full_disk(error):
                raise
            kept = hint if self.folder.is_kept else "nothing was kept"
            raise DataError(
                f"{path.parent}: {error.strerror} after {self.counts['input_bytes'] / 1e6:.1f} MB of input; "
                f"{kept}; free some space or choose another --output-prefix"
            ) from error
        except DataError:
            if self.folder.is_kept:
                logger.warning("%s once the cause is removed", hint)
            raise

    def write(self, progress: Progress | None) -> None:
        """Write every dataset into the folder, continuing behind `progress`, until only the names are missing."""
        with ExitStack() as stack:
            try:
                if progress is not None and not self.counts.keys() <= progress.counts.keys():
                    raise DamagedPartsError(f"{self.folder.path}: begun by a version that counted less")
                self._open_writers(stack, progress)
            except DamagedPartsError as error:
                logger.warning("%s; starting again", error)
                self.folder.clear()
                progress = None
                self._open_writers(stack, progress)
            if progress is not None:
                self.position, self.counts = progress.position, self.counts | progress.counts
                self.bad_records.restore(progress.bad_records)
                logger.info("resuming after %.1f MB of input (%s)", self.counts["input_bytes"] / 1e6, self.folder.path)
            elif {source.format for source in self.sources} == {text_format(self.config.document)} and (
                warning := cut_warning(self._first_texts(), self.config.split_sentences)
            ):
                logger.warning("%s: %s", self.prefixes[0], warning)
            self._consume()
            self._check_end()
            metadata = self._metadata()
            for writer, key in zip(self.writers, dataset_keys(self.config), strict=True):
                unknown, words = (self.counts[count] for count in _counts_of(key))
                own = {"json_key": key, "unknown_tokens": unknown, "words": words}
                if unknown > MOST_UNKNOWN * writer.num_tokens:
                    own["unknown_cause"] = unknown_cause(self.tokenizer, self._first_texts())
                writer.prepare(metadata | own, self.bad_records.error_lines())
            self._save(is_prepared=True)

    def _open_writers(self, stack: ExitStack, progress: Progress | None) -> None:
        dtype, overwrite = token_dtype(self.tokenizer.vocab_size), self.config.overwrite
        states = progress.writers if progress is not None else [None] * len(self.prefixes)
        self.writers = [
            stack.enter_context(
                IndexedDatasetWriter(prefix, dtype, overwrite, self.folder.path, state, bool(self.config.spans_key))
            )
            for prefix, state in zip(self.prefixes, states, strict=True)
        ]

    def _consume(self) -> None:
        config = self.config
        num_bytes = total_bytes(self.sources, config.shard)
        encoder = partial(ChunkEncoder, self.tokenizer_path, config)
        chunks = ordered_map(
            encoder, read_chunks(self.sources, config.json_keys, config.shard, self.position), config.workers
        )
        saved_bytes, saved_s = self.counts["input_bytes"], time.monotonic()
        # The pool ends before the progress display does: it may still log a worker's death.
        with byte_progress("preprocess", num_bytes) as progress, closing(chunks):
            for chunk in chunks:
                self._add(chunk)
                documents, tokens = self.writers[0].num_documents, self.writers[0].num_tokens
                progress.update(chunk.bytes_read, f"{counted(documents, 'document')}, {tokens / 1e6:.1f} M tokens")
                now_s = time.monotonic()
                if chunk.bytes_read - saved_bytes >= SAVE_INTERVAL_BYTES or now_s - saved_s >= SAVE_INTERVAL_S:
                    self._save()
                    saved_bytes, saved_s = chunk.bytes_read, now_s
        self.counts["input_bytes"] = num_bytes or self.counts["input_bytes"]

    def _add(self, chunk: EncodedChunk) -> None:
        self.counts["input_bytes"] = chunk.bytes_read
        for name in ("characters", "empty_documents", "records"):
            self.counts[name] += getattr(chunk, name)
        for key, *found in zip(dataset_keys(self.config), chunk.unknown, chunk.words, strict=True):
            for count, number in zip(_counts_of(key), found, strict=True):
                self.counts[count] += number
        for bad in chunk.bad_records:
            self.bad_records.add(bad, self.counts["records"])
        for writer, documents in zip(self.writers, chunk.keys, strict=True):
            writer.add_documents(*documents)
        self.position = chunk.position

    def _save(self, is_prepared: bool = False) -> None:
        states, bad_records = [writer.save() for writer in self.writers], self.bad_records.to_json()
        build = self.folder.build_key
        self.folder.save(Progress(build, self.position, states, self.counts, bad_records, is_prepared))

    def _check_end(self) -> None:
        if any(writer.num_sequences for writer in self.writers):
            return
        found = f"{self.counts['empty_documents']} empty documents, {self.bad_records.count} bad records"
        if self.config.shard.count == 1:
            if unreadable := self.bad_records.all_unreadable(self.counts["records"]):
                raise DataError(f"the input holds no text: {unreadable}")
            raise DataError(f"the input holds no text ({found}); check --input and --json-keys")
        logger.warning("shard %d holds no text (%s): an empty dataset", self.config.shard.index, found)

    def _first_texts(self) -> list[str]:
        chunks = islice(read_chunks(self.sources, self.config.json_keys, self.config.shard), 1)
        documents = (document for chunk in chunks for document in parse_chunk(chunk, self.config.json_keys))
        texts = (text for one in documents if not isinstance(one, BadRecord) for text in one.values())
        return list(islice(texts, _LOOKED_AT))

    def _metadata(self) -> dict[str, Any]:
        config, tokenizer = self.config, self.tokenizer
        return {
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "tokenizer_path": str(self.tokenizer_path.resolve()),
            "tokenizer_kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
            "sentence_prefix": encoded_prefix(config, tokenizer),
            "split_sentences": config.split_sentences,
            "sentence_splitter": SPLITTER_VERSION if config.split_sentences else None,
            "keep_newlines": config.keep_newlines,
            "append_eod": config.append_eod,
            "split_special_tokens": config.split_special_tokens,
            "shard": [config.shard.index, config.shard.count],
            "build_key": self.folder.build_key,
            "empty_documents": self.counts["empty_documents"],
            "bad_records": self.bad_records.count,
            "bad_record_reasons": dict(sorted(self.bad_records.reasons.items())),
            "inputs": self.inputs,
            "sources": [source.name.encode("utf-8", "replace").decode("utf-8") for source in self.sources],
            "source_signature": self.signature,
            "input_format": config.input_format,
            "json_keys": list(config.json_keys),
            "build_version": BUILD_VERSION,
            "input_bytes": self.counts["input_bytes"],
            "characters": self.counts["characters"],
            **({"spans_key": config.spans_key} if config.spans_key else {}),
            **({"prepend_bos": True} if config.prepend_bos else {}),
        }


def _counts_of(key: str) -> tuple[str, str]:
    return f"unknown tokens: {key}", f"words: {key}"


def _check_joined(config: PreprocessConfig) -> None:
    if not config.join_keys:
        return
    if len(config.json_keys) < 2:
        raise DataError(f"--join-keys: --json-keys names only {config.json_keys[0]}; name the keys of both texts")
    for name, value in (("split-sentences", config.split_sentences), ("append-eod", config.append_eod)):
        if value:
            raise DataError(f"--join-keys: each text is one sequence of its document; leave out --{name}")


def _check_spans(sources: Sequence[Source], config: PreprocessConfig) -> None:
    if config.spans_key and len(config.json_keys) > 1:
        raise DataError(f"--spans-key {config.spans_key}: --json-keys must name the one text that the spans are in")
    for source in sources if config.spans_key else ():
        if source.format != "jsonl":
            raise DataError(f"{source.path}: --spans-key needs JSON lines, this input is {source.format}")
