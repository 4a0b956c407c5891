"""The reader of checkpoints: any range of any shard of any parameter, from chunks that any layout wrote.

A checkpoint is layout-free: per full parameter name it holds the fp32 weight and the optimizer's moments, in chunks
that index.json lists (chunk_index.py).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.checkpoint.chunk_index import (
    CARRIED_KIND,
    INDEX_NAME,
    WEIGHT_KIND,
    ChunkEntry,
    ParameterChunks,
    ShardChunks,
    TensorFileReader,
    check_shape,
    group_chunks,
)
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.parallel.placement import Rectangle, Shard
from ctxlm_ds.recipe.sections import EMA_KIND
from ctxlm_ds.untrusted_json import read_json_object

if TYPE_CHECKING:
    import torch

MAX_INDEX_BYTES = 1 << 30
READ_ELEMENTS = 1 << 21
"""Largest part of a chunk (8 MiB) that is held next to the result if rows are read only in part."""


class CheckpointReader:
    """A checkpoint's folder (RUN/checkpoints/step-…) opened for reading; only the ranges asked for are loaded.

    Raises CheckpointError if the index is missing or damaged, or chunks do not cover a parameter exactly once.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, TensorFileReader] = {}
        self._groups: dict[str, dict[str, list[ShardChunks]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        index_path = self.path / INDEX_NAME
        if not index_path.exists():
            raise CheckpointError(f"{self.path}: no {INDEX_NAME}, so this is not a checkpoint folder")
        index = read_json_object(index_path, CheckpointError, MAX_INDEX_BYTES)
        try:
            self.scalars = _numbers(index["scalars"])
            """Numbers that belong to no parameter."""
            self._load_index(index["parameters"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index_path}: damaged ({type(error).__name__}: {error})") from None

    def names(self) -> list[str]:
        return [name for name in self._shapes if CARRIED_KIND not in self._groups[name]]

    def carried_names(self) -> list[str]:
        """Return the names of carried tensors, `NAME.MICROBATCH`."""
        return [name for name in self._shapes if CARRIED_KIND in self._groups[name]]

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise CheckpointError(f"{self.path}: no parameter {name!r} in this checkpoint")
        return self._shapes[name]

    def kinds(self, name: str) -> list[str]:
        """Return what is stored of a parameter: `weight` and the optimizer's moments."""
        return sorted(self._groups[name], key=lambda kind: (kind != WEIGHT_KIND, kind))

    def take_averages(self) -> None:
        """Read the moving averages in place of the weights; CheckpointError if there are none (training.ema).

        Parameters that were not trained have none and keep their weights.
        """
        averaged = [kinds for kinds in self._groups.values() if EMA_KIND in kinds]
        if not averaged:
            raise CheckpointError(f"{self.path} has no averages: its run has no training.ema; leave out --weights ema")
        for kinds in averaged:
            kinds[WEIGHT_KIND] = kinds[EMA_KIND]

    def moment_kinds(self) -> list[str]:
        """Return the kinds of moments that any parameter has, such as `exp_avg` and `exp_avg_sq`."""
        found = {kind for kinds in self._groups.values() for kind in kinds}
        return sorted(found - {WEIGHT_KIND, CARRIED_KIND})

    def read(
        self, name: str, kind: str = WEIGHT_KIND, start: int = 0, length: int | None = None, shard: Shard | None = None
    ) -> torch.Tensor:
        """Return elements start..start+length (None: to the end) of a shard's flat local order as 1-D fp32 on the CPU.

        `shard` need not be one of the checkpoint; None: the full parameter. Raises CheckpointError if there
        is no such parameter or kind, the range is outside it, or a file is damaged.
        """
        import torch

        shape = self.shape(name)
        target = shard or Shard.whole(shape)
        if target.shape != shape:
            raise CheckpointError(f"{self.path}: {name} has shape {shape}, a shard of {target.shape} was asked for")
        total = target.num_elements
        end = total if length is None else start + length
        if not 0 <= start <= end <= total:
            of = name if shard is None else f"the shard of {name}"
            raise CheckpointError(f"{self.path}: {of} has {total} elements, {start}..{end} was asked for")
        if start == end:
            return torch.empty(0, dtype=torch.float32)
        kinds = self._groups[name]
        if kind not in kinds:
            raise CheckpointError(f"{self.path}: {name} has no {kind!r} (there is: {', '.join(kinds)})")
        wanted = target.rectangles(start, end - start)
        overlapping = [
            (group.shard, chunk, rectangle)
            for group in kinds[kind]
            for rectangle in wanted
            if rectangle.column_start < group.shard.columns[1] and rectangle.column_stop > group.shard.columns[0]
            for chunk in group.overlapping(*group.local_range(rectangle.row_start, rectangle.row_stop))
        ]
        # Before memory is taken for a result that the files could not fill.
        for _, chunk, _ in overlapping:
            self._file(chunk).find(chunk["key"], chunk["length"])
        result = torch.empty(end - start, dtype=torch.float32)
        for shard_there, chunk, rectangle in overlapping:
            for source in shard_there.rectangles(chunk["start"], chunk["length"]):
                self._copy_overlap(chunk, source, rectangle, result[rectangle.offset - start :])
        return result

    def read_full(self, name: str, kind: str = WEIGHT_KIND) -> torch.Tensor:
        """Return the full parameter in its shape, fp32 on the CPU."""
        return self.read(name, kind).reshape(self.shape(name))

    def _load_index(self, parameters: ParameterChunks) -> None:
        listed: set[tuple[str, str]] = set()
        for name, parameter in parameters.items():
            where = f"{self.path}: {name}"
            shape = self._shapes[name] = check_shape(where, parameter["shape"])
            groups = self._groups[name] = {}
            for kind, chunks in parameter["pieces"].items():
                groups[kind] = group_chunks(f"{where} ({kind})", shape, chunks)
                for chunk in chunks:
                    file, key = chunk["file"], chunk["key"]
                    if not isinstance(file, str) or not isinstance(key, str) or (file, key) in listed:
                        raise ValueError(f"{name} ({kind}): {key!r} of {file!r} is no tensor of a file or listed twice")
                    if "/" in file or "\0" in file or file in ("", ".", ".."):
                        raise ValueError(f"{name} ({kind}): file {file!r} is not in the checkpoint's folder")
                    listed.add((file, key))

    def _copy_overlap(self, chunk: ChunkEntry, source: Rectangle, target: Rectangle, result: torch.Tensor) -> None:
        """Read the elements that both rectangles hold; `result` begins with the target's first element."""
        top, bottom = max(source.row_start, target.row_start), min(source.row_stop, target.row_stop)
        left, right = max(source.column_start, target.column_start), min(source.column_stop, target.column_stop)
        width = right - left
        if top >= bottom or width <= 0:
            return
        first = source.offset - chunk["start"] + (top - source.row_start) * source.width + left - source.column_start
        offset = (top - target.row_start) * target.width + left - target.column_start
        file, key, length = self._file(chunk), chunk["key"], chunk["length"]
        if width == source.width == target.width or bottom - top == 1:
            file.read_into(key, length, first, result[offset : offset + (bottom - top) * width])
            return
        rows_at_once = max(1, READ_ELEMENTS // source.width)
        for row in range(top, bottom, rows_at_once):
            count = min(rows_at_once, bottom - row)
            band = result.new_empty((count - 1) * source.width + width)
            file.read_into(key, length, first + (row - top) * source.width, band)
            into = result[offset + (row - top) * target.width :].as_strided((count, width), (target.width, 1))
            into.copy_(band.as_strided((count, width), (source.width, 1)))

    def _file(self, chunk: ChunkEntry) -> TensorFileReader:
        name = chunk["file"]
        if name not in self._files:
            self._files[name] = TensorFileReader(self.path / name)
        return self._files[name]


def _numbers(values: Any) -> dict[str, float]:
    """Return a mapping of names to finite numbers; raise ValueError for anything else."""
    for name, value in values.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"scalars: {name} is {value!r}, expected a number")
    return dict(values)
