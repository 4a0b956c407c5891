"""Join datasets into one without decoding them: .bin copied in blocks, .idx streamed, all checksums checked meanwhile.

In: prefixes, in the order wanted. Out: the files that one preprocessing of the whole would have written (the JSON lists
the parts as well). Memory does not grow with the tokens. All files are written aside; the .idx, without which no reader
opens a dataset, gets its name last. Not here: which prefixes are meant, and whether they belong together
(merge_inputs.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.atomic import fsync_path, is_full_disk, partial_path, report_leftovers
from ctxlm_ds.console import ByteProgress, byte_progress, format_size
from ctxlm_ds.data.dataset.checksums import check_digest, dataset_manifest
from ctxlm_ds.data.dataset.index_file import DTYPES, HEADER, MAGIC, VERSION
from ctxlm_ds.data.dataset.merge_inputs import MergeInput, build_key, find_parts, merged_metadata, open_parts
from ctxlm_ds.data.dataset.reader import IndexedDataset, dataset_file
from ctxlm_ds.data.dataset.writer import EXTENSIONS, part_file, publish_parts
from ctxlm_ds.data.preprocess.pool import stop_signals_interrupt
from ctxlm_ds.errors import DataError

_MAX_ERROR_LINES = 1000
_BLOCK_BYTES = 1 << 20
"""What is read, hashed twice and written while it is in the processor's cache: blocks of 4 MB took 4 times as long."""
_NUM_BUFFERS = 4
_FLUSH_BYTES = 1 << 28
_INDEX_ITEMS = 1 << 19


@dataclass(frozen=True, slots=True)
class MergeResult:
    """A joined dataset."""

    prefix: str
    num_parts: int
    num_documents: int
    num_sequences: int
    num_tokens: int
    num_bytes: int
    """Size of .bin and .idx together."""
    seconds: float
    complete_already: bool
    """It was there, joined from the same parts, and was left as it is."""


def merge_datasets(inputs: Sequence[str], output_prefix: str | Path, overwrite: bool = False) -> MergeResult:
    """Join datasets (prefixes, or folders of them) in the order given.

    Raises:
        DataError: parts do not belong together, one is missing or damaged, the output exists and was made of something
            else, or the disk is full; whatever was written is removed first.
    """
    start_s = time.monotonic()
    output = str(output_prefix)
    whole = _Whole(open_parts(find_parts(inputs, output)))
    complete = not overwrite and _is_complete(output, whole)
    if not complete:
        _refuse_existing(output, overwrite)
        _write(output, whole, overwrite)
    seconds = time.monotonic() - start_s
    counts = (len(whole.parts), whole.documents, whole.sequences, whole.tokens, whole.bin_bytes + whole.idx_bytes)
    return MergeResult(output, *counts, seconds, complete)


class _Whole:
    """What the parts come to together."""

    def __init__(self, parts: Sequence[MergeInput]) -> None:
        self.parts = parts
        self.dtype = parts[0].dtype
        self.documents = sum(part.num_documents for part in parts)
        self.sequences = sum(part.num_sequences for part in parts)
        self.tokens = sum(part.num_tokens for part in parts)
        self.bin_bytes = self.tokens * self.dtype.itemsize
        self.idx_bytes = HEADER.size + 12 * self.sequences + 8 * (self.documents + 1)

    def index_blocks(self) -> Iterator[bytes]:
        """Make the joined .idx in blocks, always as MMIDIDX."""
        code = next(code for code, known in DTYPES.items() if known == self.dtype)
        yield HEADER.pack(MAGIC, VERSION, code, self.sequences, self.documents + 1)
        for part in self.parts:
            for lengths in _blocks(part.open().arrays.lengths):
                yield lengths.astype("<i4").tobytes()
        before = 0
        for part in self.parts:
            arrays = part.open().arrays
            for offsets in _blocks(arrays.offsets):
                yield ((offsets // arrays.token_offset + before) * self.dtype.itemsize).astype("<i8").tobytes()
            before += part.num_tokens
        yield bytes(8)
        before = 0
        for part in self.parts:
            for ends in _blocks(part.open().arrays.documents[1:]):
                yield (ends + before).astype("<i8").tobytes()
            before += part.num_sequences


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[np.int64]]:
    for first in range(0, len(array), _INDEX_ITEMS):
        yield array[first : first + _INDEX_ITEMS].astype(np.int64)


def _is_complete(output: str, whole: _Whole) -> bool:
    """Look whether the output is there and was joined from these very parts (its tokens are not read again)."""
    if not all(dataset_file(output, name).is_file() for name in ("bin", "idx")):
        return False
    try:
        present = IndexedDataset(output)
        index_digest = present.index_digest
    except DataError:
        return False
    if whole.parts[0].metadata:
        return present.metadata is not None and present.metadata.get("build_key") == build_key(whole.parts)
    # Megatron's parts have no JSON to compare; the index tells the length of every sequence of every part.
    digest = hashlib.sha256()
    for block in whole.index_blocks():
        digest.update(block)
    return present.metadata is None and present.tokens.nbytes == whole.bin_bytes and index_digest == digest.hexdigest()


def _refuse_existing(output: str, overwrite: bool) -> None:
    existing = [str(path) for path in (dataset_file(output, name) for name in EXTENSIONS) if path.exists()]
    if existing and not overwrite:
        raise DataError(
            f"{', '.join(existing)} exist(s) already, and not as these parts joined; choose another --output-prefix or "
            "pass --overwrite"
        )


def _write(output: str, whole: _Whole, overwrite: bool) -> None:
    folder = Path(output).parent
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = whole.bin_bytes + whole.idx_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(
            f"{folder}: {format_size(free)} are free, the joined dataset takes {format_size(needed)}; free some space "
            "or choose another --output-prefix"
        )
    report_leftovers(Path(output))
    aside = partial_path(Path(output))
    try:
        with stop_signals_interrupt():
            aside.mkdir()
            _write_aside(output, whole, aside)
            _refuse_existing(output, overwrite)  # another join may have finished meanwhile
            publish_parts(output, aside)
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise DataError(
            f"{folder}: {error.strerror}; nothing was kept, free some space or choose another --output-prefix"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_aside(output: str, whole: _Whole, folder: Path) -> None:
    """Write all files of the joined dataset into `folder` and flush them."""
    with byte_progress("merge", whole.bin_bytes + whole.idx_bytes) as progress:
        digests = {"bin": _write_tokens(whole.parts, part_file(folder, output, "bin"), progress)}
        digests["idx"] = _write_index(whole, part_file(folder, output, "idx"), progress)
    small: dict[str, bytes] = {}
    counts = {"documents": whole.documents, "sequences": whole.sequences, "tokens": whole.tokens}
    metadata = merged_metadata(whole.parts, {**counts, "dtype": whole.dtype.name}, dict(digests))
    if metadata is not None:
        small["json"] = (json.dumps(metadata, indent=2, ensure_ascii=False) + "\n").encode()
        digests["json"] = hashlib.sha256(small["json"]).hexdigest()
    small["errors.jsonl"] = b"".join(islice(_error_lines(whole.parts), _MAX_ERROR_LINES))
    small["sha256"] = dataset_manifest(output, digests).encode()
    for extension, content in small.items():
        if content:
            part_file(folder, output, extension).write_bytes(content)
    for path in folder.iterdir():
        fsync_path(path)


def _error_lines(parts: Sequence[MergeInput]) -> Iterator[bytes]:
    """Read the records that were skipped when the parts were made, as far as they were kept."""
    for part in parts:
        path = dataset_file(part.prefix, "errors.jsonl")
        if path.is_file():
            with open(path, "rb") as file:
                yield from file


def _write_tokens(parts: Sequence[MergeInput], path: Path, progress: ByteProgress) -> str:
    with ExitStack() as resources:
        joiner = _Joiner(path, progress, resources)
        for part in parts:
            joiner.append(dataset_file(part.prefix, "bin"), part.num_tokens * part.dtype.itemsize, part.bin_digests)
        return joiner.finish()


def _write_index(whole: _Whole, path: Path, progress: ByteProgress) -> str:
    digest, done = hashlib.sha256(), whole.bin_bytes
    with open(path, "wb") as out:
        for block in whole.index_blocks():
            out.write(block)
            digest.update(block)
            done += len(block)
            progress.update(done)
    return digest.hexdigest()


class _Joiner:
    """Appends files to one. The whole and each part are hashed in two threads, flushed in a third, while it copies."""

    def __init__(self, path: Path, progress: ByteProgress, resources: ExitStack) -> None:
        self._written = self._flushed_bytes = 0
        self._progress = progress
        self._whole = hashlib.sha256()
        self._free = [memoryview(bytearray(_BLOCK_BYTES)) for _ in range(_NUM_BUFFERS)]
        self._in_use: deque[tuple[memoryview, list[Future[None]]]] = deque()
        self._checks: deque[Future[None]] = deque()
        self._flushed: Future[None] | None = None
        self._out = resources.enter_context(open(path, "wb", buffering=0))  # noqa: SIM115 (`resources` closes it)
        self._whole_thread, self._part_thread, self._flush_thread = (
            resources.enter_context(ThreadPoolExecutor(1)) for _ in range(3)
        )

    def append(self, path: Path, num_bytes: int, recorded: Sequence[tuple[Path, str]]) -> None:
        """Copy a file of `num_bytes`; `recorded` are its checksums and the files that hold them.

        Raises DataError if the file ends early. A wrong checksum is raised here or, at the latest, by `finish`.
        """
        # The hash of the whole is that of its first part until the second begins.
        is_first = self._written == 0
        digest = self._whole if is_first else hashlib.sha256()
        thread = self._whole_thread if is_first else self._part_thread
        left = num_bytes
        with open(path, "rb", buffering=0) as source:
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while left:
                buffer = self._free_buffer()
                count = source.readinto(buffer[: min(left, _BLOCK_BYTES)])
                if not count:
                    raise DataError(f"{path}: ends {left} bytes early; it was changed while it was being joined")
                block = buffer[:count]
                hashed = [self._whole_thread.submit(self._whole.update, block)]
                if recorded and not is_first:
                    hashed.append(self._part_thread.submit(digest.update, block))
                self._in_use.append((buffer, hashed))
                self._write(block)
                left -= count
        for where, expected in recorded:
            self._checks.append(thread.submit(_check, path, digest, expected, where))

    def finish(self) -> str:
        """Give the sha256 (hex) of everything. Raises DataError if a part was not what its checksum says."""
        for check in self._checks:
            check.result()
        self._whole_thread.submit(lambda: None).result()
        if self._flushed is not None:
            self._flushed.result()
        return self._whole.hexdigest()

    def _free_buffer(self) -> memoryview:
        while self._checks and self._checks[0].done():
            self._checks.popleft().result()
        if self._free:
            return self._free.pop()
        buffer, hashed = self._in_use.popleft()
        wait(hashed)
        return buffer

    def _write(self, block: memoryview) -> None:
        while block:
            block = block[self._out.write(block) :]
        self._written = self._out.tell()
        self._progress.update(self._written)
        # Left alone, the kernel holds back gigabytes and writes them while the final flush waits.
        if self._written - self._flushed_bytes >= _FLUSH_BYTES and (self._flushed is None or self._flushed.done()):
            self._flushed_bytes = self._written
            self._flushed = self._flush_thread.submit(os.fdatasync, self._out.fileno())


def _check(path: Path, digest: Any, expected: str, where: Path) -> None:
    check_digest(path, digest.hexdigest(), expected, where)
