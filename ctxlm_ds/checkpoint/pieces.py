"""Writing the layout-free form: each rank's pieces into files of its own, and an index that covers each element once.

In: flat fp32 ranges of parameters or of tensor-parallel shards. Out: safetensors files and index.json, or a
CheckpointError that names what is missing, double or outside. Not here: reading (layout_free.py), which rank owns what
(training/fragments.py), sizes and checksums (manifest.py).
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.atomic import write_text
from ctxlm_ds.checkpoint.manifest import FileEntry
from ctxlm_ds.checkpoint.tensor_file import FP32_BYTES, PlannedTensorFile, TensorFile, TensorFileWriter
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.parallel.shards import Shard

if TYPE_CHECKING:
    import torch

INDEX_NAME = "index.json"
WEIGHT_KIND = "weight"
CARRIED_KIND = "carried"
"""Of what layers carry from step to step, named `NAME.MICROBATCH`: no parameter, and no weight beside it."""
# Room for the header of about 2,000 pieces; a longer header costs one more copy of the file.
HEADER_ROOM_BYTES = 1 << 18

FILE_STEMS = {WEIGHT_KIND: "weights", CARRIED_KIND: "carried"}

ParameterPieces = dict[str, dict[str, Any]]
Piece = dict[str, Any]
MAX_SIZE = 1 << 48
"""No dimension of a parameter is longer; a larger number in an index is damage."""


def estimate_bytes(num_elements: int, num_kinds: int = 3) -> int:
    """Bytes that a rank will write for `num_elements` parameters in `num_kinds` kinds (weight and two moments)."""
    return num_elements * num_kinds * FP32_BYTES + 2 * HEADER_ROOM_BYTES


@dataclass(frozen=True)
class Flushed:
    """What a rank wrote, where its files are on the disk and hashed already."""

    value: Any
    files: Mapping[str, FileEntry]


class PieceWriter:
    """Writes one rank's pieces: weights-RRRRR.safetensors, moments-RRRRR and carried-RRRRR in `directory`.

    Args:
        directory: an existing folder, the same for all ranks.
        rank: names the files.
        header_room_bytes: space reserved for each file's header.
    """

    def __init__(self, directory: Path, rank: int, header_room_bytes: int = HEADER_ROOM_BYTES) -> None:
        self._directory = directory
        self._rank = rank
        self._room_bytes = header_room_bytes
        self._files: dict[str, TensorFile] = {}
        self._parameters: ParameterPieces = {}

    def add(
        self, name: str, kind: str, shape: Sequence[int], start: int, values: torch.Tensor, shard: Shard | None = None
    ) -> None:
        """Write one piece; an empty one is left out.

        Args:
            name: the parameter's full name.
            kind: `weight`, `carried`, or a moment such as `exp_avg` and `exp_avg_sq`.
            shape: of the whole parameter.
            start: offset of the piece in the shard's flat local order (of a whole parameter: row-major).
            values: 1-D fp32, on any device; copied to the CPU and written at once.
            shard: what the piece is a range of; None for the whole parameter.

        Raises:
            CheckpointError: the piece does not fit the parameter, or is not flat fp32.
        """
        import torch

        where = f"{name} ({kind})"
        if values.dtype != torch.float32 or values.dim() != 1:
            raise CheckpointError(f"{where}: a piece is 1-D float32, got {values.dim()}-D {values.dtype}")
        shard = shard or Shard.whole(shape)
        if shard.shape != tuple(shape):
            raise CheckpointError(f"{where}: a shard of shape {shard.shape}, the parameter has {tuple(shape)}")
        length = values.numel()
        if start < 0 or start + length > shard.num_elements:
            of = f"its shape {tuple(shape)}" if shard.is_whole else f"its shard of {shard.num_elements}"
            raise CheckpointError(f"{where}: elements {start}..{start + length} lie outside {of}")
        parameter = self._parameters.setdefault(name, {"shape": list(shape), "pieces": {}})
        if parameter["shape"] != list(shape):
            raise CheckpointError(f"{where}: shape {tuple(shape)}, before it was {tuple(parameter['shape'])}")
        if length == 0:
            return
        file = self._file(FILE_STEMS.get(kind, "moments"))
        key = _free_key(file, name if kind == WEIGHT_KIND else f"{name}#{kind}", start)
        file.append(key, values.detach().to("cpu").contiguous())
        piece = {"file": file.path.name, "key": key, "start": start, "length": length}
        described = shard.to_json()
        if described is not None:
            piece["shard"] = described
        parameter["pieces"].setdefault(kind, []).append(piece)

    def close(self) -> ParameterPieces:
        """Finish the files; this rank's part of the index: {name: {"shape", "pieces": {kind: [piece]}}}."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        return self._parameters

    def _file(self, stem: str) -> TensorFile:
        if stem not in self._files:
            path = self._directory / f"{stem}-{self._rank:05d}.safetensors"
            self._files[stem] = self._make_file(path, self._room_bytes)
        return self._files[stem]

    def _make_file(self, path: Path, room_bytes: int) -> TensorFile:
        return TensorFileWriter(path, room_bytes)


class PlannedPieceWriter(PieceWriter):
    """The same files, from pieces that stay in memory: written by `write_files` alone, in one go, hashed on the way."""

    def write_files(self, check: Callable[[], None]) -> Flushed:
        """Write, flush and hash the files.

        Args:
            check: called every few megabytes; what it raises ends the writing.
        """
        planned = [file for file in self._files.values() if isinstance(file, PlannedTensorFile)]
        return Flushed(self.close(), {file.path.name: file.write(check) for file in planned})

    def _make_file(self, path: Path, room_bytes: int) -> TensorFile:
        return PlannedTensorFile(path, room_bytes)


def _free_key(file: TensorFile, key: str, start: int) -> str:
    """The parameter's name; for a second piece with its start, and where shards share that, with a number."""
    if key in file:
        key = f"{key}@{start}"
    number = 2
    numbered = key
    while numbered in file:
        numbered = f"{key}+{number}"
        number += 1
    return numbered


def merge_index(
    directory: Path, pieces_by_rank: Iterable[ParameterPieces], scalars: Mapping[str, Any]
) -> dict[str, Any]:
    """Write index.json from every rank's pieces (rank 0 only).

    Args:
        directory: the checkpoint's folder.
        pieces_by_rank: what each rank's PieceWriter.close() returned.
        scalars: JSON values that belong to no parameter (such as the optimizer's step).

    Raises:
        CheckpointError: ranks disagree on a shape, or pieces of a parameter overlap or leave a gap.
    """
    parameters: ParameterPieces = {}
    for rank, pieces in enumerate(pieces_by_rank):
        for name, found in pieces.items():
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
            groups = group_pieces(f"{name} ({kind})", shape, listed)
            parameter["pieces"][kind] = [piece for group in groups for piece in group.pieces]
        if not {WEIGHT_KIND, CARRIED_KIND} & parameter["pieces"].keys() and Shard.whole(shape).num_elements:
            raise CheckpointError(f"{name}: no rank wrote its weight")
    index = {"parameters": dict(sorted(parameters.items())), "scalars": dict(scalars)}
    write_text(directory / INDEX_NAME, json.dumps(index, separators=(",", ":")) + "\n")
    return index


@dataclass(frozen=True)
class ShardPieces:
    """The pieces of one shard, ascending and without gaps."""

    shard: Shard
    pieces: list[Piece]
    starts: list[int]

    def overlapping(self, first: int, last: int) -> Iterator[Piece]:
        """Pieces that hold any of elements first..last of the shard's local order."""
        if first < last:
            low = bisect_right(self.starts, first) - 1
            yield from self.pieces[max(low, 0) : bisect_left(self.starts, last)]

    def local_range(self, row_start: int, row_stop: int) -> tuple[int, int]:
        """The local elements that lie in these rows of the full matrix."""
        width = self.shard.num_columns
        return self._rows_before(row_start) * width, self._rows_before(row_stop) * width

    def _rows_before(self, row: int) -> int:
        return sum(min(stop, row) - start for start, stop in self.shard.rows if start < row)


def check_shape(where: str, shape: Any) -> tuple[int, ...]:
    """The shape that an index gives.

    Raises:
        CheckpointError: it is none.
    """
    if not isinstance(shape, (list, tuple)) or not all(type(size) is int and 0 <= size < MAX_SIZE for size in shape):
        raise CheckpointError(f"{where}: {shape!r} is not a shape")
    return tuple(shape)


def group_pieces(where: str, shape: Sequence[int], pieces: Sequence[Piece]) -> list[ShardPieces]:
    """The pieces of one kind of one parameter by shard.

    Args:
        where: for messages.
        shape: of the full parameter.
        pieces: in any order.

    Raises:
        CheckpointError: they do not cover the parameter exactly once.
    """
    by_shard: dict[Shard, list[Piece]] = {}
    shards: dict[str, Shard] = {}
    for piece in pieces:
        described = piece.get("shard")
        key = "" if described is None else repr(described)
        if key not in shards:
            try:
                shards[key] = Shard.from_json(shape, described)
            except ValueError as error:
                raise CheckpointError(f"{where}: {error} ({piece.get('file')})") from None
        by_shard.setdefault(shards[key], []).append(piece)
    whole = Shard.whole(shape)
    if whole.num_elements == 0 or not by_shard:
        by_shard.setdefault(whole, [])
    groups = [_in_order(where, shard, listed) for shard, listed in by_shard.items()]
    groups.sort(key=lambda group: (group.shard.rows, group.shard.columns))
    problem = _cover_problem(whole.shape, tuple(group.shard for group in groups))
    if problem:
        raise CheckpointError(f"{where}: {problem}")
    return groups


def _in_order(where: str, shard: Shard, pieces: list[Piece]) -> ShardPieces:
    """Pieces of one shard must cover its local order exactly once."""
    at = where if shard.is_whole else f"{where}, {_describe(shard)}"
    for piece in pieces:
        if type(piece["start"]) is not int or type(piece["length"]) is not int:
            raise CheckpointError(f"{at}: a piece starts at {piece['start']!r} and has {piece['length']!r} elements")
    ordered = sorted(pieces, key=lambda piece: piece["start"])
    end = 0
    for piece in ordered:
        start, length = piece["start"], piece["length"]
        if length <= 0 or start < end:
            raise CheckpointError(f"{at}: pieces overlap at element {start} ({piece['file']})")
        if start > end:
            raise CheckpointError(f"{at}: elements {end}..{start} are in no piece")
        end = start + length
    total = shard.num_elements
    if end != total:
        outside = "its shape" if shard.is_whole else "the shard"
        problem = "are in no piece" if end < total else f"lie outside {outside}"
        raise CheckpointError(f"{at}: elements {min(end, total)}..{max(end, total)} {problem}")
    return ShardPieces(shard, ordered, [piece["start"] for piece in ordered])


def _describe(shard: Shard) -> str:
    rows = " and ".join(f"{start}..{stop}" for start, stop in shard.rows) or "none"
    return f"rows {rows} of columns {shard.columns[0]}..{shard.columns[1]}"


@lru_cache(maxsize=4096)
def _cover_problem(shape: tuple[int, ...], shards: tuple[Shard, ...]) -> str | None:
    """What is double or missing where shards should make up a matrix; the same few layouts occur in every layer.

    Goes down the matrix from one row where a block begins or ends to the next; the columns of the blocks that are open
    there must follow each other.
    """
    num_rows, num_columns = Shard.whole(shape).matrix_shape
    if num_rows == 0 or num_columns == 0:
        return None
    events: dict[int, list[tuple[bool, tuple[int, int]]]] = {0: [], num_rows: []}
    for shard in shards:
        for start, stop in shard.rows if shard.num_columns else ():
            events.setdefault(start, []).append((True, shard.columns))
            events.setdefault(stop, []).append((False, shard.columns))
    opened: list[tuple[int, int]] = []
    bounds = sorted(events)
    for row, next_row in zip(bounds, bounds[1:], strict=False):
        for begins, columns in sorted(events[row], key=lambda event: event[0]):
            (opened.append if begins else opened.remove)(columns)
        end = 0
        for first, last in sorted(opened):
            if first < end:
                return f"pieces overlap at row {row}, column {first}"
            if first > end:
                return f"rows {row}..{next_row} of columns {end}..{first} are in no piece"
            end = last
        if end < num_columns:
            return f"rows {row}..{next_row} of columns {end}..{num_columns} are in no piece"
    return None
