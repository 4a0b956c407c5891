"""The part of a parameter that a tensor-parallel rank holds, from the parameter's declared split.

The splits are Megatron-LM's (Shoeybi 2019): a rank has its heads' rows of query, key and value, its rows of the first
feed-forward matrix, the matching columns of the matrices after them, and consecutive rows of the vocabulary. So a part
is a Shard: blocks of rows and a range of columns. A parameter counts as a matrix [shape[0], prod(shape[1:])]; one of a
single dimension has 1 column, a scalar is [1, 1]. Imports torch only for types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ctxlm_ds.errors import ConfigError

if TYPE_CHECKING:
    import torch

Range = tuple[int, int]


class Rectangle(NamedTuple):
    """Rows x columns of the full matrix whose elements are consecutive, row by row, in a shard's order."""

    offset: int
    """Index of the first element in the shard's local order."""
    row_start: int
    row_stop: int
    column_start: int
    column_stop: int

    @property
    def width(self) -> int:
        return self.column_stop - self.column_start

    @property
    def num_elements(self) -> int:
        return (self.row_stop - self.row_start) * self.width


@dataclass(frozen=True)
class Shard:
    """Blocks of rows of a parameter, all with the same columns.

    The local order is that of the tensor which a tensor-parallel layer holds: the blocks one below the other, row by
    row. A flat range of that tensor is a range of the local order. Adjacent blocks are joined and empty ones dropped,
    so equal shards compare equal. A range or tensor that does not fit is a ValueError.
    """

    shape: tuple[int, ...]
    """Shape of the full parameter."""
    rows: tuple[Range, ...]
    """Half-open, ascending, disjoint."""
    columns: Range
    """Half-open."""

    def __post_init__(self) -> None:
        """Join adjacent blocks; raise ValueError if the blocks are not in the shape, in ascending order."""
        if not all(map(_is_count, self.shape)):
            raise ValueError(f"shape {self.shape} is not one of a tensor")
        num_rows, num_columns = self.matrix_shape
        blocks: list[Range] = []
        end = 0
        for block in self.rows:
            start, stop = _range(block)
            if not end <= start <= stop <= num_rows:
                raise ValueError(f"rows {self.rows} are not ascending ranges of {num_rows} rows")
            end = stop
            if blocks and blocks[-1][1] == start:
                blocks[-1] = (blocks[-1][0], stop)
            elif start < stop:
                blocks.append((start, stop))
        first, last = _range(self.columns)
        if not 0 <= first <= last <= num_columns:
            raise ValueError(f"columns {self.columns} are not a range of {num_columns} columns")
        object.__setattr__(self, "rows", tuple(blocks))
        object.__setattr__(self, "columns", (first, last))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Shard:
        """Return all elements of a parameter."""
        num_rows, num_columns = matrix_shape(shape)
        return cls(tuple(shape), ((0, num_rows),), (0, num_columns))

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the full parameter."""
        return matrix_shape(self.shape)

    @property
    def num_rows(self) -> int:
        return sum(stop - start for start, stop in self.rows)

    @property
    def num_columns(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.num_columns

    @property
    def is_whole(self) -> bool:
        """True if this is the full parameter."""
        return self.num_elements == math.prod(self.matrix_shape)

    def rectangles(self, start: int = 0, length: int | None = None) -> list[Rectangle]:
        """Return `length` elements (None for all) from `start` of the local order, at most three per block of rows."""
        stop = self.num_elements if length is None else start + length
        if not 0 <= start <= stop <= self.num_elements:
            raise ValueError(f"elements {start}..{stop} are not in a shard of {self.num_elements}")
        width, left = self.num_columns, self.columns[0]
        found: list[Rectangle] = []
        block_offset = 0
        for row_start, row_stop in self.rows:
            block_elements = (row_stop - row_start) * width
            first, last = max(start - block_offset, 0), min(stop - block_offset, block_elements)
            # Elements first..last of the block: the end of a row, complete rows, the start of a row.
            while first < last:
                row, column = divmod(first, width)
                complete_rows = (last - first) // width if column == 0 else 0
                column_stop = width if complete_rows else min(width, column + last - first)
                top = row_start + row
                bottom = top + max(1, complete_rows)
                found.append(Rectangle(block_offset + first, top, bottom, left + column, left + column_stop))
                first += found[-1].num_elements
            block_offset += block_elements
        return found

    def extract(self, full: torch.Tensor) -> torch.Tensor:
        """Return a copy of the shard, 1-D in the local order, of a full parameter."""
        self._check_full(full)
        matrix = full.reshape(self.matrix_shape)
        local = full.new_empty(self.num_elements)
        for r in self.rectangles():
            block = matrix[r.row_start : r.row_stop, r.column_start : r.column_stop]
            local[r.offset : r.offset + r.num_elements] = block.reshape(-1)
        return local

    def place(self, full: torch.Tensor, local_flat: torch.Tensor, start: int = 0) -> None:
        """Copy 1-D `local_flat`, elements start.. of the local order, into a contiguous full parameter."""
        self._check_full(full)
        if not full.is_contiguous():
            raise ValueError("the full parameter to fill is not contiguous")
        matrix = full.view(self.matrix_shape)
        for r in self.rectangles(start, local_flat.numel()):
            values = local_flat[r.offset - start : r.offset - start + r.num_elements]
            matrix[r.row_start : r.row_stop, r.column_start : r.column_stop] = values.view(-1, r.width)

    def to_json(self) -> dict[str, Any] | None:
        """Return None for a complete parameter, else its rows and, if these are not all, its columns."""
        if self.is_whole:
            return None
        described: dict[str, Any] = {"rows": [list(block) for block in self.rows]}
        if self.columns != (0, self.matrix_shape[1]):
            described["columns"] = list(self.columns)
        return described

    @classmethod
    def from_json(cls, shape: Sequence[int], described: Mapping[str, Any] | None) -> Shard:
        """Return the shard that to_json() described, or raise ValueError if none of this shape is described."""
        if described is None:
            return cls.whole(shape)
        if not isinstance(described, Mapping) or not described.keys() <= {"rows", "columns"}:
            raise ValueError(f"{described!r} does not describe a shard")
        rows = described.get("rows")
        if not isinstance(rows, (list, tuple)):
            raise ValueError(f"rows {rows!r} of a shard are not a list")
        return cls(tuple(shape), tuple(rows), described.get("columns", (0, matrix_shape(shape)[1])))

    def _check_full(self, full: torch.Tensor) -> None:
        if tuple(full.shape) != self.shape:
            raise ValueError(f"a tensor of shape {tuple(full.shape)} is not the full parameter {self.shape}")


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a parameter as a matrix."""
    return (shape[0], math.prod(shape[1:])) if len(shape) else (1, 1)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _range(value: Any) -> Range:
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(map(_is_count, value)):
        raise ValueError(f"{value!r} is not a range of rows or columns")
    return (value[0], value[1])


@dataclass(frozen=True)
class Split:
    """The division of a parameter among tensor-parallel ranks."""

    axis: Literal["rows", "columns", "vocabulary"]
    """`rows`: equal runs of rows (outputs); `columns`: of columns (inputs); `vocabulary`: rows, padded at the end."""
    blocks: tuple[int, ...] = ()
    """`rows`: rows of each block that is split separately (query, key and value); empty for one block of all rows."""


ROWS, COLUMNS, VOCABULARY = Split("rows"), Split("columns"), Split("vocabulary")
ALIGNED_ROWS = 128
"""Matrix products on GPUs are slow if the length of a row of logits is odd or not a multiple of their tiles."""
FEWEST_ALIGNED_WORDS = 4096
"""A rank with fewer words has no padding by default."""


def vocabulary_rows_per_rank(vocab_size: int, size: int, vocab_multiple: int | None = 1) -> int:
    """Return the rows of each rank's part of the word embeddings, a multiple of `vocab_multiple` with padding.

    None is ALIGNED_ROWS if that adds few rows, and else 1.
    """
    multiple = vocab_multiple or (ALIGNED_ROWS if vocab_size >= size * FEWEST_ALIGNED_WORDS else 1)
    return -(-vocab_size // (size * multiple)) * multiple


def shard_of(
    name: str, split: Split | None, shape: Sequence[int], size: int, rank: int, vocab_multiple: int | None = 1
) -> Shard:
    """Return the shard of a parameter on tensor-parallel rank `rank` of `size`; padding rows are in no shard.

    `shape` is that of the full parameter, and messages have its `name`. `vocab_multiple`: see vocabulary_rows_per_rank.
    Raises ConfigError if a split size is not divisible by the number of ranks.
    """
    if not 0 <= rank < size or (vocab_multiple is not None and vocab_multiple < 1):
        raise ValueError(f"rank {rank} of {size}, multiple {vocab_multiple}")
    whole = Shard.whole(shape)
    num_rows, num_columns = whole.matrix_shape
    if size == 1 or split is None:
        return whole
    if split.axis == "vocabulary":
        height = vocabulary_rows_per_rank(num_rows, size, vocab_multiple)
        return Shard(whole.shape, ((min(rank * height, num_rows), min((rank + 1) * height, num_rows)),), whole.columns)
    if split.axis == "columns":
        width = _share(name, num_columns, size)
        return Shard(whole.shape, whole.rows, (rank * width, (rank + 1) * width))
    ranges, top = [], 0
    for block in split.blocks or (num_rows,):
        height = _share(name, block, size)
        ranges.append((top + rank * height, top + (rank + 1) * height))
        top += block
    if top != num_rows:
        raise ValueError(f"{name}: blocks {split.blocks} do not add up to {num_rows} rows")
    return Shard(whole.shape, tuple(ranges), whole.columns)


def _share(name: str, total: int, parts: int) -> int:
    if total % parts:
        raise ConfigError(
            f"{name}: {total} cannot be split into {parts} equal parts; choose parallel.tensor_parallel_size so that "
            "it divides the number of heads, the hidden size and the intermediate size"
        )
    return total // parts
