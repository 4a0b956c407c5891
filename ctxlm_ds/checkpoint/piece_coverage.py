"""Whether the pieces of a parameter cover it exactly once, whatever shards they are ranges of.

In: the pieces that an index lists. Out: them by shard, in order, or a CheckpointError that names what is missing,
double or outside. Not here: their values (layout_free.py).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.parallel.shards import Shard

Piece = dict[str, Any]
MAX_SIZE = 1 << 48
"""No dimension of a parameter is longer; a larger number in an index is damage."""


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
