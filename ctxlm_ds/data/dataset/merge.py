"""Join datasets into one without decoding them.

The result is what one preprocessing of all the text would have written; its JSON lists the parts as well. .bin is
copied in blocks while all checksums are checked, .idx is streamed, and memory does not grow with the tokens. The files
are written in PREFIX.partial-merge/, which is locked: the next join of that name removes what a killed one left.
merge_inputs.py finds the parts and checks that they belong together.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.atomic import PARTIAL_MARK, is_full_disk
from ctxlm_ds.console import ByteProgress, byte_progress, format_size
from ctxlm_ds.data.dataset.checksums import check_digest
from ctxlm_ds.data.dataset.index_file import HEADER, index_blocks, write_blocks
from ctxlm_ds.data.dataset.merge_inputs import MergeInput, build_key, find_parts, merged_metadata, open_parts
from ctxlm_ds.data.dataset.reader import IndexedDataset, dataset_file
from ctxlm_ds.data.dataset.writer import part_file, publish_parts, refuse_existing, write_descriptions
from ctxlm_ds.data.preprocess.folder import PartialFolder
from ctxlm_ds.data.preprocess.pool import stop_signals_interrupt
from ctxlm_ds.errors import DataError

logger = logging.getLogger("ctxlm_ds")

FOLDER_SUFFIX = f"{PARTIAL_MARK}merge"
_MAX_ERROR_LINES = 1000
_BLOCK_BYTES = 1 << 20
"""Read, hashed twice and written while it is in the processor's cache: blocks of 4 MB took 4 times as long."""
_NUM_BUFFERS = 4
_FLUSH_BYTES = 1 << 28
_INDEX_ITEMS = 1 << 19
_NOT_THESE = ", and not as these parts joined"


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
    """True if it existed, joined from the same parts, and was left as it is."""


class _Joined:
    """Counts and index of all parts together."""

    def __init__(self, parts: Sequence[MergeInput]) -> None:
        self.parts = parts
        self.dtype = parts[0].dtype
        self.documents = sum(part.num_documents for part in parts)
        self.sequences = sum(part.num_sequences for part in parts)
        self.tokens = sum(part.num_tokens for part in parts)
        self.bin_bytes = self.tokens * self.dtype.itemsize
        self.num_bytes = self.bin_bytes + HEADER.size + 12 * self.sequences + 8 * (self.documents + 1)

    def index_blocks(self) -> Iterator[bytes]:
        """Yield the joined .idx in blocks, always as MMIDIDX."""
        return index_blocks(self.dtype, self.sequences, self.documents, self._lengths, self._document_ends)

    def _lengths(self) -> Iterator[NDArray[np.int64]]:
        for part in self.parts:
            yield from _blocks(part.open().arrays.lengths)

    def _document_ends(self) -> Iterator[NDArray[np.int64]]:
        before = 0
        for part in self.parts:
            for ends in _blocks(part.open().arrays.documents[1:]):
                yield ends + before
            before += part.num_sequences


def _blocks(array: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for first in range(0, len(array), _INDEX_ITEMS):
        yield array[first : first + _INDEX_ITEMS].astype(np.int64)


def merge_datasets(inputs: Sequence[str], output_prefix: str | Path, overwrite: bool = False) -> MergeResult:
    """Join datasets (prefixes, or folders of them) in the order given.

    Raises:
        DataError: parts do not belong together, one is missing or damaged, the output exists and was made of something
            else, another process writes it, or the disk is full; what was written is removed first.
    """
    start_s = time.monotonic()
    output = str(output_prefix)
    joined = _Joined(open_parts(find_parts(inputs, output)))
    complete = not overwrite and _is_complete(output, joined)
    folder = PartialFolder(output, suffix=FOLDER_SUFFIX)
    if not complete:
        refuse_existing(output, overwrite, _NOT_THESE)
        _write(output, joined, folder, overwrite)
    elif folder.path.exists():
        with suppress(DataError), folder:  # killed after the last file got its name; leaving removes the folder
            pass
    counts = (len(joined.parts), joined.documents, joined.sequences, joined.tokens, joined.num_bytes)
    return MergeResult(output, *counts, time.monotonic() - start_s, complete)


def _is_complete(output: str, joined: _Joined) -> bool:
    """Return whether the output exists and was joined from these parts (its tokens are not read again)."""
    if not all(dataset_file(output, name).is_file() for name in ("bin", "idx")):
        return False
    try:
        present = IndexedDataset(output)
        index_digest = present.index_digest
    except DataError:
        return False
    if joined.parts[0].metadata:
        return present.metadata is not None and present.metadata.get("build_key") == build_key(joined.parts)
    # Megatron's parts have no JSON to compare; the index has the length of every sequence of every part.
    digest = hashlib.sha256()
    for block in joined.index_blocks():
        digest.update(block)
    return present.metadata is None and present.tokens.nbytes == joined.bin_bytes and index_digest == digest.hexdigest()


def _write(output: str, joined: _Joined, folder: PartialFolder, overwrite: bool) -> None:
    parent = Path(output).parent
    try:
        with folder, stop_signals_interrupt():
            if folder.clear():
                logger.info("%s: removed what an interrupted join left", folder.path)
            if (free := shutil.disk_usage(parent).free) < joined.num_bytes:
                raise DataError(
                    f"{parent}: {format_size(free)} are free, the joined dataset takes {format_size(joined.num_bytes)};"
                    " free some space or choose another --output-prefix"
                )
            _write_parts(output, joined, folder.path)
            folder.check()
            refuse_existing(output, overwrite, _NOT_THESE)  # another program may have written it meanwhile
            publish_parts(output, folder.path)
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise DataError(
            f"{parent}: {error.strerror}; nothing was kept, free some space or choose another --output-prefix"
        ) from error


def _write_parts(output: str, joined: _Joined, folder: Path) -> None:
    """Write all files of the joined dataset into `folder` and flush them."""
    bin_path, idx_path = (part_file(folder, output, extension) for extension in ("bin", "idx"))
    with byte_progress("merge", joined.num_bytes) as progress:
        digests = {"bin": _copy_tokens(joined.parts, bin_path, progress)}
        digests["idx"] = write_blocks(idx_path, joined.index_blocks())
        progress.update(joined.num_bytes)
    counts = {"documents": joined.documents, "sequences": joined.sequences, "tokens": joined.tokens}
    metadata = merged_metadata(joined.parts, {**counts, "dtype": joined.dtype.name}, digests)
    errors = b"".join(itertools.islice(_error_lines(joined.parts), _MAX_ERROR_LINES))
    write_descriptions(folder, output, metadata, digests, errors)


def _error_lines(parts: Sequence[MergeInput]) -> Iterator[bytes]:
    """Yield the records that were skipped when the parts were made, as far as they were kept."""
    for part in parts:
        path = dataset_file(part.prefix, "errors.jsonl")
        if path.is_file():
            with open(path, "rb") as file:
                yield from file


def _copy_tokens(parts: Sequence[MergeInput], path: Path, progress: ByteProgress) -> str:
    """Append the .bin of all parts to one file and return its sha256 (hex).

    Two threads hash the blocks, for the joined file and for the part, and a third flushes them while this one copies.
    Raises DataError if a part ends early or is not what a recorded checksum says.
    """
    all_digest, written, flushed = hashlib.sha256(), 0, 0
    flush: Future[None] | None = None
    with ExitStack() as stack:
        out = stack.enter_context(open(path, "wb", buffering=0))
        all_thread, part_thread, flusher = (stack.enter_context(ThreadPoolExecutor(1)) for _ in range(3))
        for part in parts:
            digest = hashlib.sha256()
            updates = [(all_thread, all_digest.update)]
            if part.bin_digests:
                updates.append((part_thread, digest.update))
            for block in _hashed_blocks(part, updates):
                while block:
                    block = block[out.write(block) :]
                written = out.tell()
                progress.update(written)
                # Left alone, the kernel holds back gigabytes and writes them while the final flush waits.
                if written - flushed >= _FLUSH_BYTES and (flush is None or flush.done()):
                    flushed, flush = written, flusher.submit(os.fdatasync, out.fileno())
            for source, recorded in part.bin_digests:
                check_digest(dataset_file(part.prefix, "bin"), digest.hexdigest(), recorded, source)
        if flush is not None:
            flush.result()
        os.fsync(out.fileno())
    return all_digest.hexdigest()


def _hashed_blocks(
    part: MergeInput, updates: Sequence[tuple[ThreadPoolExecutor, Callable[[memoryview], None]]]
) -> Iterator[memoryview]:
    """Yield the .bin of a part in blocks, each handed to every update; at the end all updates are done."""
    path, left = dataset_file(part.prefix, "bin"), part.num_tokens * part.dtype.itemsize
    pending: dict[int, list[Future[None]]] = {}
    buffers = [memoryview(bytearray(_BLOCK_BYTES)) for _ in range(_NUM_BUFFERS)]
    with open(path, "rb", buffering=0) as source:
        for number in itertools.cycle(range(_NUM_BUFFERS)):
            wait(pending.pop(number, []))
            count = source.readinto(buffers[number][: min(left, _BLOCK_BYTES)])
            if not left:
                break
            if not count:
                raise DataError(f"{path}: ends {left} bytes early; it was changed while it was being joined")
            block = buffers[number][:count]
            pending[number] = [thread.submit(update, block) for thread, update in updates]
            yield block
            left -= count
    wait([update for updates in pending.values() for update in updates])
