"""The chunks of a checkpoint's parameters: written, and found again by index.json, which calls them pieces.

It says which chunk of which file holds which flat range of a parameter, or of a tensor-parallel shard of it.
The files are safetensors: each is written in a single pass from tensors read one at a time, and read by ranges of
bytes. They are not mapped, so that one which is cut off while it is read is an error and does not end the process.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BufferedReader
from itertools import chain, count, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ctxlm_ds.atomic import write_text
from ctxlm_ds.checkpoint.manifest import FileEntry, seal
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.parallel.placement import Shard
from ctxlm_ds.untrusted_json import open_regular

if TYPE_CHECKING:
    import torch

INDEX_NAME = "index.json"
WEIGHT_KIND = "weight"
CARRIED_KIND = "carried"
"""What layers carry from step to step, named `NAME.MICROBATCH`; such an entry is no parameter and has no weight."""
MAX_SIZE = 1 << 48
"""No dimension of a parameter is longer; a larger number in an index is damage."""

FP32_BYTES = 4
CODE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes per element by the format's name of a data type."""
LENGTH_BYTES = 8
ALIGNMENT = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
WRITE_BYTES = 1 << 23
FLUSH_BYTES = 1 << 28

ParameterChunks = dict[str, dict[str, Any]]
ChunkEntry = dict[str, Any]


def merge_index(
    directory: Path, chunks_by_rank: Iterable[ParameterChunks], scalars: Mapping[str, Any]
) -> dict[str, Any]:
    """Write index.json from the value of each rank's ChunkWriter.write(), and numbers that belong to no parameter.

    Raises CheckpointError if ranks disagree on a shape, or chunks of a parameter overlap or leave a gap.
    """
    parameters: ParameterChunks = {}
    for rank, chunks in enumerate(chunks_by_rank):
        for name, found in chunks.items():
            parameter = parameters.setdefault(name, {"shape": found["shape"], "pieces": {}})
            if parameter["shape"] != found["shape"]:
                raise CheckpointError(
                    f"{name}: shape {tuple(found['shape'])} on rank {rank}, {tuple(parameter['shape'])} before"
                )
            for kind, listed in found["pieces"].items():
                parameter["pieces"].setdefault(kind, []).extend(listed)
    for name, parameter in parameters.items():
        shape = check_shape(name, parameter["shape"])
        for kind, listed in parameter["pieces"].items():
            groups = group_chunks(f"{name} ({kind})", shape, listed)
            parameter["pieces"][kind] = [chunk for group in groups for chunk in group.chunks]
        if not {WEIGHT_KIND, CARRIED_KIND} & parameter["pieces"].keys() and Shard.whole(shape).num_elements:
            raise CheckpointError(f"{name}: no rank wrote its weight")
    index = {"parameters": dict(sorted(parameters.items())), "scalars": dict(scalars)}
    write_text(directory / INDEX_NAME, json.dumps(index, separators=(",", ":")) + "\n")
    return index


@dataclass(frozen=True)
class ShardChunks:
    """The chunks of one shard, in ascending order and without gaps."""

    shard: Shard
    chunks: list[ChunkEntry]

    def overlapping(self, first: int, last: int) -> Iterator[ChunkEntry]:
        """Yield the chunks that hold any of elements first..last of the shard's local order."""
        if first < last:
            low = bisect_right(self.chunks, first, key=itemgetter("start")) - 1
            yield from self.chunks[max(low, 0) : bisect_left(self.chunks, last, key=itemgetter("start"))]

    def local_range(self, row_start: int, row_stop: int) -> tuple[int, int]:
        """Return the range of local elements that are in these rows of the full matrix."""
        width = self.shard.num_columns
        return self._rows_before(row_start) * width, self._rows_before(row_stop) * width

    def _rows_before(self, row: int) -> int:
        return sum(min(stop, row) - start for start, stop in self.shard.rows if start < row)


def check_shape(where: str, shape: Any) -> tuple[int, ...]:
    """Return a shape of an index as a tuple; raise CheckpointError if it is not a shape."""
    if not isinstance(shape, (list, tuple)) or not all(type(size) is int and 0 <= size < MAX_SIZE for size in shape):
        raise CheckpointError(f"{where}: {shape!r} is not a shape")
    return tuple(shape)


def group_chunks(where: str, shape: Sequence[int], chunks: Sequence[ChunkEntry]) -> list[ShardChunks]:
    """Return the chunks, in any order, of one kind of one parameter by shard; `where` begins the messages.

    Raises CheckpointError if they do not cover the parameter exactly once.
    """
    whole = Shard.whole(shape)
    by_shard: dict[Shard, list[ChunkEntry]] = {}
    # Most of the hundreds of thousands of chunks of many ranks share a few shards.
    shards = {"None": whole}
    for chunk in chunks:
        key = repr(chunk.get("shard"))
        if key not in shards:
            try:
                shards[key] = Shard.from_json(shape, chunk["shard"])
            except ValueError as error:
                raise CheckpointError(f"{where}: {error} ({chunk.get('file')})") from None
        by_shard.setdefault(shards[key], []).append(chunk)
    if whole.num_elements == 0 or not by_shard:
        by_shard.setdefault(whole, [])
    groups = [_in_order(where, shard, listed) for shard, listed in by_shard.items()]
    groups.sort(key=lambda group: (group.shard.rows, group.shard.columns))
    problem = _cover_problem(whole.shape, tuple(group.shard for group in groups))
    if problem:
        raise CheckpointError(f"{where}: {problem}")
    return groups


def _in_order(where: str, shard: Shard, chunks: list[ChunkEntry]) -> ShardChunks:
    """Sort the chunks of one shard, which must cover its local order exactly once."""
    at = where
    if not shard.is_whole:
        rows = " and ".join(f"{start}..{stop}" for start, stop in shard.rows) or "none"
        at = f"{where}, rows {rows} of columns {shard.columns[0]}..{shard.columns[1]}"
    for chunk in chunks:
        if type(chunk["start"]) is not int or type(chunk["length"]) is not int:
            raise CheckpointError(f"{at}: a chunk starts at {chunk['start']!r} and has {chunk['length']!r} elements")
    ordered = sorted(chunks, key=lambda chunk: chunk["start"])
    end = 0
    for chunk in ordered:
        start, length = chunk["start"], chunk["length"]
        if length <= 0 or start < end:
            raise CheckpointError(f"{at}: chunks overlap at element {start} ({chunk['file']})")
        if start > end:
            raise CheckpointError(f"{at}: elements {end}..{start} are in no chunk")
        end = start + length
    total = shard.num_elements
    if end != total:
        outside = "its shape" if shard.is_whole else "the shard"
        problem = "are in no chunk" if end < total else f"are outside {outside}"
        raise CheckpointError(f"{at}: elements {min(end, total)}..{max(end, total)} {problem}")
    return ShardChunks(shard, ordered)


@lru_cache(maxsize=4096)
def _cover_problem(shape: tuple[int, ...], shards: tuple[Shard, ...]) -> str | None:
    """Describe what is double or missing if shards do not make up a matrix.

    Between two rows at which a block begins or ends, the columns of the blocks there must follow each other. Results
    are cached because the same few layouts occur in every layer.
    """
    num_rows, num_columns = Shard.whole(shape).matrix_shape
    blocks = [(*rows, *shard.columns) for shard in shards if shard.num_columns for rows in shard.rows]
    bounds = sorted({0, num_rows, *(row for start, stop, _, _ in blocks for row in (start, stop))})
    for row, next_row in pairwise(bounds if num_columns else ()):
        end = 0
        here = sorted((first, last) for start, stop, first, last in blocks if start <= row < stop)
        for first, last in (*here, (num_columns, num_columns)):
            if first < end:
                return f"chunks overlap at row {row}, column {first}"
            if first > end:
                return f"rows {row}..{next_row} of columns {end}..{first} are in no chunk"
            end = last
    return None


FILE_STEMS = {WEIGHT_KIND: "weights", CARRIED_KIND: "carried"}


@dataclass(frozen=True)
class WrittenFiles:
    """A rank's files, flushed to the disk and hashed, and what rank 0 needs of them."""

    value: Any
    files: Mapping[str, FileEntry]


class ChunkWriter:
    """Writer of weights-RANK.safetensors, moments-RANK and carried-RANK in a folder."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._files: dict[str, TensorFileWriter] = {}
        self._parameters: ParameterChunks = {}

    def add(
        self,
        name: str,
        kind: str,
        shape: Sequence[int],
        start: int,
        values: torch.Tensor | LazyTensor,
        shard: Shard | None = None,
    ) -> None:
        """List one chunk of a parameter, for `write` to write; an empty one is left out.

        `start` is its offset in the flat local order of the shard (None: of the full parameter, row-major), `shape`
        that of the full parameter, `kind` `weight`, `carried` or a moment; elements are saved as fp32.
        """
        if not isinstance(values, LazyTensor):
            values = LazyTensor(values.numel(), values.detach)
        shard = shard or Shard.whole(shape)
        assert shard.shape == tuple(shape) and 0 <= start <= shard.num_elements - values.length, (name, kind, start)
        parameter = self._parameters.setdefault(name, {"shape": list(shape), "pieces": {}})
        if values.length == 0:
            return
        path = self._directory / f"{FILE_STEMS.get(kind, 'moments')}-{self._rank:05d}.safetensors"
        file = self._files.setdefault(path.name, TensorFileWriter(path))
        base = name if kind == WEIGHT_KIND else f"{name}#{kind}"
        # A second chunk is named by its start as well, and counted if shards share that start.
        keys = chain([base, f"{base}@{start}"], (f"{base}@{start}+{number}" for number in count(2)))
        key = next(free for free in keys if free not in file)
        file.add(key, (values.length,), lambda: values.read().detach().cpu().float())
        chunk = {"file": path.name, "key": key, "start": start, "length": values.length}
        if not shard.is_whole:
            chunk["shard"] = shard.to_json()
        parameter["pieces"].setdefault(kind, []).append(chunk)

    def write(self, check: Callable[[], None] = lambda: None) -> WrittenFiles:
        """Write, flush and hash the files, with one chunk in memory at a time; `check` may raise to end the writing.

        Returns the files with this rank's part of the index: {name: {"shape", "pieces": {kind: [chunk]}}}.
        """
        files = {name: file.write(check) for name, file in self._files.items()}
        return WrittenFiles(self._parameters, files)


def write_weights(
    directory: Path, step: int, shapes: Mapping[str, Sequence[int]], read: Callable[[str], torch.Tensor]
) -> None:
    """Write weights without moments, and the manifest of all files of the folder; one parameter is in memory.

    `read` returns a parameter by name, of any shape with its elements.
    """
    writer = ChunkWriter(directory, 0)
    for name, shape in shapes.items():
        writer.add(name, WEIGHT_KIND, shape, 0, LazyTensor(math.prod(shape), partial(read, name)))
    written = writer.write()
    merge_index(directory, [written.value], {})
    seal(directory, step, written.files)


class LazyTensor(NamedTuple):
    """A tensor that is made when it is written."""

    length: int
    read: Callable[[], torch.Tensor]
    """Returns the elements, of any shape."""


class TensorFileWriter:
    """The tensors of a safetensors file, listed first, then written together; `code` names their data type."""

    def __init__(self, path: Path, code: str = "F32") -> None:
        self.path = path
        self._code = code
        self._entries: dict[str, dict[str, Any]] = {}
        self._reads: list[Callable[[], torch.Tensor]] = []
        self._data_bytes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def add(self, key: str, shape: Sequence[int], read: Callable[[], torch.Tensor]) -> None:
        """List a tensor of `shape`, which `read` returns on the CPU in the file's data type."""
        end = self._data_bytes + math.prod(shape) * CODE_BYTES[self._code]
        self._entries[key] = {"dtype": self._code, "shape": list(shape), "data_offsets": [self._data_bytes, end]}
        self._data_bytes = end
        self._reads.append(read)

    def write(self, check: Callable[[], None] = lambda: None) -> FileEntry:
        """Write, flush and hash the file, with one tensor in memory at a time.

        `check` is called every few megabytes; what it raises ends the writing. An OSError has the file's name.
        """
        digest = hashlib.sha256()
        unflushed_bytes = size_bytes = 0
        try:
            with open(self.path, "xb", buffering=0) as file:
                for block in self._blocks():
                    check()
                    digest.update(block)
                    size_bytes += len(block)
                    unflushed_bytes += len(block)
                    while block:
                        block = block[file.write(block) :]
                    if unflushed_bytes >= FLUSH_BYTES:
                        # Too much unwritten data would hold up everything else that writes to the disk.
                        os.fdatasync(file.fileno())
                        unflushed_bytes = 0
                os.fsync(file.fileno())
        except OSError as error:
            # Only opening names the file in its error.
            error.filename = error.filename or str(self.path)
            raise
        return FileEntry(size_bytes, digest.hexdigest())

    def _blocks(self) -> Iterator[memoryview]:
        """Yield the header and the tensors' bytes, a few megabytes at a time."""
        import torch

        header = json.dumps({"__metadata__": {"format": "pt"}, **self._entries}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % ALIGNMENT)
        data = (memoryview(read().contiguous().view(-1).view(torch.uint8).numpy()) for read in self._reads)
        for part in chain([memoryview(len(header).to_bytes(LENGTH_BYTES, "little") + header)], data):
            for start in range(0, part.nbytes, WRITE_BYTES):
                yield part[start : start + WRITE_BYTES]


class TensorFileReader:
    """Reader of ranges of the flat fp32 tensors of a safetensors file; each read opens the file.

    Raises CheckpointError if there is no such file, or it is not of this format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                self._entries = _read_header(file)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing; verify the checkpoint or use the one before it") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: cannot read its header ({error})") from None

    def find(self, key: str, length: int) -> int:
        """Return the first byte of a tensor; raise CheckpointError if the file has none of this name and length."""
        entry = self._entries.get(key)
        if entry is None:
            raise CheckpointError(f"{self.path}: cannot read {key} (the file has no flat F32 tensor of this name)")
        start, found = entry
        if found != length:
            raise CheckpointError(
                f"{self.path}: cannot read {key} (it is F32 [{found}], the index says F32 [{length}])"
            )
        return start

    def read_into(self, key: str, length: int, first: int, target: torch.Tensor) -> None:
        """Fill 1-D contiguous fp32 `target` on the CPU with elements of a tensor, from `first` on.

        Raises CheckpointError if the file is damaged, or holds no such tensor of `length` elements.
        """
        start = self.find(key, length) + first * FP32_BYTES
        buffer = memoryview(target.numpy()).cast("B")
        try:
            with open_regular(self.path) as file:
                file.seek(start)
                if file.readinto(buffer) != len(buffer):
                    raise CheckpointError(f"{self.path}: cannot read {key} (the file ends too early)")
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot read {key} ({error})") from None


def _read_header(file: BufferedReader) -> dict[str, tuple[int, int]]:
    """Return (first byte, number of elements) of each flat fp32 tensor; raise ValueError if there is no header."""
    size_bytes = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if header_bytes > min(MAX_HEADER_BYTES, size_bytes - LENGTH_BYTES):
        raise ValueError(f"{size_bytes} bytes, too short for a header of {header_bytes}")
    entries = json.loads(file.read(header_bytes))
    if not isinstance(entries, dict):
        raise ValueError("not an object")
    data_start = LENGTH_BYTES + header_bytes
    found: dict[str, tuple[int, int]] = {}
    for key, entry in entries.items():
        with suppress(KeyError, TypeError, ValueError):
            (length,), (first, last) = entry["shape"], entry["data_offsets"]
            is_flat = entry["dtype"] == "F32" and {type(length), type(first), type(last)} == {int}
            if is_flat and 0 <= first == last - length * FP32_BYTES and last <= size_bytes - data_start:
                found[key] = (data_start + first, length)
    return found
