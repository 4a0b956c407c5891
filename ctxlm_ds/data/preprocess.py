"""Documents to indexed datasets: read, split, tokenize in worker processes, write in order.

In: corpus files and a tokenizer folder. Out: `{prefix}_{key}_{sentence|document}.{bin,idx,json}`, the same bytes for
any number of workers. Memory is bounded by the chunks in flight (two a worker, a megabyte each).
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.console import byte_progress
from ctxlm_ds.data.indexed import token_dtype
from ctxlm_ds.data.indexed_writer import IndexedDatasetWriter, refuse_existing
from ctxlm_ds.data.pool import ordered_map, stop_signals_interrupt
from ctxlm_ds.data.sentences import split_sentences
from ctxlm_ds.data.sources import BadRecord, Chunk, check_keys, find_sources, parse_chunk, read_chunks, total_bytes
from ctxlm_ds.errors import DataError
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer

logger = logging.getLogger("ctxlm_ds")

_UNKNOWN_SIZE_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class PreprocessConfig:
    """How documents become a dataset (the names of Megatron's flags)."""

    json_keys: tuple[str, ...] = ("text",)
    """Keys (columns) of a record to take; each gives a dataset of its own."""
    split_sentences: bool = False
    """A sequence is a sentence; otherwise the whole document."""
    keep_newlines: bool = False
    """Sentences keep the line ends behind them (only seen by tokenizers that have tokens for them)."""
    append_eod: bool = False
    """The separator (`[SEP]`, `</s>`, `<|endoftext|>`) ends each document, counted in its last sequence's length."""
    workers: int = 1
    """Worker processes; the result does not depend on it."""
    max_bad_records: int = 0
    """Records that may be skipped because they are no documents (invalid JSON, undecodable bytes, a missing key)."""
    input_format: str = "auto"
    """`auto` (by file name), `text`, `jsonl` or `parquet`."""
    overwrite: bool = False
    """Replace datasets that exist."""


@dataclass(slots=True)
class EncodedKey:
    """The documents of one chunk for one key."""

    tokens: NDArray[np.int32]
    """[tokens], flat."""
    lengths: NDArray[np.int64]
    """[sequences], tokens of each."""
    document_sizes: NDArray[np.int64]
    """[documents], sequences of each."""


@dataclass(slots=True)
class EncodedChunk:
    """What a worker hands back."""

    keys: list[EncodedKey]
    bytes_read: int
    characters: int = 0
    empty_documents: int = 0
    bad_records: list[BadRecord] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PreprocessResult:
    """One finished dataset."""

    prefix: str
    metadata: dict[str, Any]
    seconds: float


class ChunkEncoder:
    """Parses, splits and tokenizes one chunk at a time."""

    def __init__(self, tokenizer: Tokenizer, config: PreprocessConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        documents: list[dict[str, str]] = []
        result = EncodedChunk([], chunk.bytes_read)
        for document in parse_chunk(chunk, self.config.json_keys):
            if isinstance(document, BadRecord):
                result.bad_records.append(document)
            else:
                documents.append(document)
                result.characters += sum(map(len, document.values()))
        by_key = [self._encode([document[key] for document in documents]) for key in self.config.json_keys]
        # A document empty under every key is left out; under one of several it stays, so that the datasets of all
        # keys keep the same documents (Megatron pairs titles and texts by number).
        kept = [any(encoded[number] for encoded in by_key) for number in range(len(documents))]
        result.empty_documents = kept.count(False)
        for encoded in by_key:
            result.keys.append(_flatten([sequences for sequences, keep in zip(encoded, kept, strict=True) if keep]))
        return result

    def _encode(self, texts: list[str]) -> list[list[list[int]]]:
        """The sequences (lists of ids) of each text; none for an empty one."""
        pieces: list[str] = []
        counts: list[int] = []
        for text in texts:
            parts = self._split(text)
            counts.append(len(parts))
            pieces.extend(parts)
        ids = iter(self.tokenizer.encode_batch(pieces))
        documents = [[tokens for tokens in (next(ids) for _ in range(count)) if tokens] for count in counts]
        if self.config.append_eod:
            for document in documents:
                if document:
                    document[-1].append(self.tokenizer.sep_id)
        return documents

    def _split(self, text: str) -> list[str]:
        if not text.strip():
            return []
        if not self.config.split_sentences:
            return [text]
        sentences = split_sentences(text, self.config.keep_newlines)
        # Byte-level BPE writes the space before a word into its token: a sentence that follows another has one.
        return sentences[:1] + [self.tokenizer.sentence_prefix + sentence for sentence in sentences[1:]]


def _flatten(documents: list[list[list[int]]]) -> EncodedKey:
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.fromiter((len(sequence) for sequence in sequences), dtype=np.int64, count=len(sequences))
    tokens = np.fromiter(chain.from_iterable(sequences), dtype=np.int32, count=int(lengths.sum()))
    sizes = np.fromiter((len(document) for document in documents), dtype=np.int64, count=len(documents))
    return EncodedKey(tokens, lengths, sizes)


def build_encoder(tokenizer_path: str, config: PreprocessConfig) -> ChunkEncoder:
    """A ChunkEncoder in a worker process."""
    return ChunkEncoder(load_tokenizer(tokenizer_path), config)


def dataset_prefix(output_prefix: str | Path, key: str, config: PreprocessConfig) -> str:
    """Megatron's name of a dataset."""
    return f"{output_prefix}_{key}_{'sentence' if config.split_sentences else 'document'}"


def preprocess(
    inputs: Sequence[str], tokenizer_path: str | Path, output_prefix: str | Path, config: PreprocessConfig
) -> list[PreprocessResult]:
    """Write one dataset a key; every one is complete, or none exists.

    Raises DataError for unreadable input, more bad records than allowed, existing output or a full disk, and
    TokenizerError for an unfit tokenizer; whatever was written is removed first.
    """
    if config.workers < 1:
        raise DataError(f"--workers {config.workers}: at least 1 is needed")
    sources = find_sources(inputs, config.input_format)
    check_keys(sources, config.json_keys)
    tokenizer = load_tokenizer(tokenizer_path)
    prefixes = [dataset_prefix(output_prefix, key, config) for key in config.json_keys]
    for prefix in prefixes:
        refuse_existing(prefix, config.overwrite)
    start_s = time.monotonic()
    run = _Run(config, tokenizer, total_bytes(sources))
    try:
        with ExitStack() as stack:
            stack.enter_context(stop_signals_interrupt())
            dtype = token_dtype(tokenizer.vocab_size)
            writers = [IndexedDatasetWriter(prefix, dtype, config.overwrite) for prefix in prefixes]
            for writer in writers:
                stack.enter_context(writer)
            build = partial(build_encoder, str(tokenizer_path), config)
            run.consume(ordered_map(build, read_chunks(sources, config.json_keys), config.workers), writers)
            metadata = run.metadata(inputs, Path(tokenizer_path))
            keyed = zip(writers, config.json_keys, strict=True)
            complete = [writer.prepare(metadata | {"json_key": key}) for writer, key in keyed]
            for writer in writers:
                writer.publish()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DataError(
            f"{Path(output_prefix).parent}: {error.strerror} after {run.input_bytes_read / 1e6:.1f} MB of input; "
            "nothing was kept, free some space or choose another --output-prefix"
        ) from error
    seconds = time.monotonic() - start_s
    return [PreprocessResult(*pair, seconds) for pair in zip(prefixes, complete, strict=True)]


class _Run:
    """Counts what passes and writes it."""

    def __init__(self, config: PreprocessConfig, tokenizer: Tokenizer, num_bytes: int) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.num_bytes = num_bytes
        self.input_bytes_read = self.characters = 0
        self.empty_documents = 0
        self.bad_records = 0

    def consume(self, chunks: Iterator[EncodedChunk], writers: list[IndexedDatasetWriter]) -> None:
        with ExitStack() as stack:
            # The pool ends before the progress display does: it may still log a worker's death.
            report = stack.enter_context(_Reporter(self.num_bytes))
            stack.callback(getattr(chunks, "close", lambda: None))
            for chunk in chunks:
                self._count(chunk)
                for writer, encoded in zip(writers, chunk.keys, strict=True):
                    _write(writer, encoded)
                report(chunk.bytes_read, writers[0].num_documents, writers[0].num_tokens)
        if not any(writer.num_sequences for writer in writers):
            raise DataError(
                f"the input holds no text ({self.empty_documents} empty documents, {self.bad_records} bad records); "
                "check --input and --json-keys"
            )

    def _count(self, chunk: EncodedChunk) -> None:
        self.input_bytes_read = chunk.bytes_read
        self.characters += chunk.characters
        self.empty_documents += chunk.empty_documents
        for bad in chunk.bad_records:
            self.bad_records += 1
            if self.bad_records > self.config.max_bad_records:
                limit = self.config.max_bad_records
                beyond = f" (more than the {limit} allowed)" if limit else ""
                raise DataError(f"{bad}; mend it, or let such records be skipped with --max-bad-records N{beyond}")
            logger.warning("skipped: %s", bad)

    def metadata(self, inputs: Sequence[str], tokenizer_path: Path) -> dict[str, Any]:
        settings = asdict(self.config)
        return {
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
            "tokenizer_path": str(tokenizer_path.resolve()),
            "tokenizer_kind": self.tokenizer.kind,
            "vocab_size": self.tokenizer.vocab_size,
            "eod_id": self.tokenizer.sep_id,
            "sentence_prefix": self.tokenizer.sentence_prefix,
            **{key: settings[key] for key in ("split_sentences", "keep_newlines", "append_eod")},
            "empty_documents": self.empty_documents,
            "bad_records": self.bad_records,
            "inputs": list(inputs),
            "input_bytes": self.input_bytes_read,
            "characters": self.characters,
        }


def _write(writer: IndexedDatasetWriter, encoded: EncodedKey) -> None:
    starts = np.concatenate([[0], np.cumsum(encoded.lengths)])
    first = 0
    for size in encoded.document_sizes.tolist():
        last = first + size
        writer.add_sequences(encoded.tokens[starts[first] : starts[last]], encoded.lengths[first:last])
        writer.end_document()
        first = last


class _Reporter(ExitStack):
    """Progress by bytes read; by documents where the size of the input is unknown (hf://)."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._update: Callable[[int, str], None] | None = None
        if num_bytes:
            self._update = self.enter_context(byte_progress("preprocess", num_bytes)).update
        self._last_s = time.monotonic()

    def __call__(self, bytes_read: int, documents: int, tokens: int) -> None:
        note = f"{documents:,} documents, {tokens / 1e6:.1f} M tokens"
        if self._update is not None:
            self._update(bytes_read, note)
        elif time.monotonic() - self._last_s >= _UNKNOWN_SIZE_INTERVAL_S:
            self._last_s = time.monotonic()
            logger.info("preprocess: %s", note)
