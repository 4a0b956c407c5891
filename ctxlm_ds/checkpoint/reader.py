"""The reader of checkpoints: any range of any shard of any parameter, from chunks that any layout wrote.

A checkpoint is layout-free: per full parameter name it holds the fp32 weight and the optimizer's moments, in chunks
that index.json lists (chunk_index.py). In: a checkpoint's folder. Out: ranges of parameters or of shards. Not here:
writing (chunk_writer.py), sizes and checksums (manifest.py).
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.checkpoint.chunk_index import (
    CARRIED_KIND,
    INDEX_NAME,
    WEIGHT_KIND,
    ChunkEntry,
    ParameterChunks,
    ShardChunks,
    check_shape,
    group_chunks,
)
from ctxlm_ds.checkpoint.tensor_file import FP32_BYTES, TensorFileReader
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.parallel.shards import Rectangle, Shard
from ctxlm_ds.untrusted_json import read_json_object

if TYPE_CHECKING:
    import torch

MAX_INDEX_BYTES = 1 << 30
OPEN_FILES = 64
READ_ELEMENTS = 1 << 21
"""Largest part of a chunk (8 MiB) that is held next to the result if rows are read only in part."""


class CheckpointReader:
    """A checkpoint opened for reading; only the ranges asked for are loaded.

    Args:
        path: a checkpoint's folder (RUN/checkpoints/step-…).

    Raises:
        CheckpointError: the index is missing or damaged, or chunks do not cover a parameter exactly once.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, TensorFileReader] = {}
        self._open: OrderedDict[str, TensorFileReader] = OrderedDict()
        self._groups: dict[str, dict[str, list[ShardChunks]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._elements_in_file: dict[str, int] = {}
        index_path = self.path / INDEX_NAME
        if not index_path.exists():
            raise CheckpointError(f"{self.path}: no {INDEX_NAME}, so this is not a checkpoint folder")
        index = read_json_object(index_path, CheckpointError, MAX_INDEX_BYTES)
        try:
            self._scalars: dict[str, float] = _numbers(index["scalars"])
            self._load_index(index["parameters"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index_path}: damaged ({type(error).__name__}: {error})") from None

    def names(self) -> list[str]:
        """Return the full names of all parameters."""
        return [name for name in self._shapes if CARRIED_KIND not in self._groups[name]]

    def carried_names(self) -> list[str]:
        """Return the names of carried tensors, `NAME.MICROBATCH`."""
        return [name for name in self._shapes if CARRIED_KIND in self._groups[name]]

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full parameter."""
        self._check_name(name)
        return self._shapes[name]

    def kinds(self, name: str) -> list[str]:
        """Return what is stored of a parameter: `weight` and the optimizer's moments."""
        self._check_name(name)
        return sorted(self._groups[name], key=lambda kind: (kind != WEIGHT_KIND, kind))

    def moment_kinds(self) -> list[str]:
        """Return the kinds of moments that any parameter has, such as `exp_avg` and `exp_avg_sq`."""
        found = {kind for kinds in self._groups.values() for kind in kinds}
        return sorted(found - {WEIGHT_KIND, CARRIED_KIND})

    def scalars(self) -> dict[str, float]:
        """Return the numbers that belong to no parameter, as they were saved."""
        return dict(self._scalars)

    def num_elements(self, name: str) -> int:
        """Return the number of elements of the full parameter."""
        return math.prod(self.shape(name))

    def read(
        self, name: str, kind: str = WEIGHT_KIND, start: int = 0, length: int | None = None, shard: Shard | None = None
    ) -> torch.Tensor:
        """Return elements start..start+length of a shard's flat local order as 1-D fp32 on the CPU.

        Args:
            name: the parameter's full name.
            kind: `weight`, `exp_avg`, `exp_avg_sq`, …
            start: first element.
            length: number of elements; None reads to the end.
            shard: what the range is part of, which need not be a shard of the checkpoint; None for the full parameter.

        Raises:
            CheckpointError: there is no such parameter or kind, the range is outside it, or a file is damaged.
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
        for group in kinds[kind]:
            self._check_files(group, wanted)
        result = torch.empty(end - start, dtype=torch.float32)
        for group in kinds[kind]:
            if group.shard == target:
                self._read_same_shard(group, start, result)
            else:
                self._read_other_shard(group, wanted, start, result)
        return result

    def read_full(self, name: str, kind: str = WEIGHT_KIND) -> torch.Tensor:
        """Return the full parameter in its shape, fp32 on the CPU."""
        return self.read(name, kind).reshape(self.shape(name))

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _load_index(self, parameters: ParameterChunks) -> None:
        """Check every chunk of the index and store it by shard."""
        for name, parameter in parameters.items():
            where = f"{self.path}: {name}"
            shape = self._shapes[name] = check_shape(where, parameter["shape"])
            groups = self._groups[name] = {}
            for kind, chunks in parameter["pieces"].items():
                groups[kind] = group_chunks(f"{where} ({kind})", shape, chunks)
                for chunk in chunks:
                    self._check_entry(f"{name} ({kind})", chunk)

    def _check_entry(self, where: str, chunk: ChunkEntry) -> None:
        file, key = chunk["file"], chunk["key"]
        if not isinstance(file, str) or not isinstance(key, str):
            raise ValueError(f"{where}: file {file!r}, key {key!r}")
        if file not in self._elements_in_file and (Path(file).name != file or "\0" in file):
            raise ValueError(f"{where}: file {file!r} is not in the checkpoint's folder")
        self._elements_in_file[file] = self._elements_in_file.get(file, 0) + chunk["length"]

    def _check_name(self, name: str) -> None:
        if name not in self._shapes:
            raise CheckpointError(f"{self.path}: no parameter {name!r} in this checkpoint")

    def _check_files(self, group: ShardChunks, wanted: list[Rectangle]) -> None:
        """Check, before memory is taken for a result, that the files are as long as the index says."""
        for rectangle in wanted:
            for chunk in group.overlapping(*group.local_range(rectangle.row_start, rectangle.row_stop)):
                elements = self._elements_in_file.get(chunk["file"], 0)
                if elements:
                    self._check_file(chunk, elements)

    def _check_file(self, chunk: ChunkEntry, elements: int) -> None:
        path = self.path / chunk["file"]
        try:
            size_bytes = os.stat(path).st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing; verify the checkpoint or use the one before it") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot read {chunk['key']} ({error})") from None
        if size_bytes < elements * FP32_BYTES:
            raise CheckpointError(f"{path}: cannot read {chunk['key']} ({size_bytes} bytes, it must have more)")
        # A file that shrinks later is found by the read.
        self._elements_in_file[chunk["file"]] = 0

    def _read_same_shard(self, group: ShardChunks, start: int, result: torch.Tensor) -> None:
        """Read a flat range in the order that the chunks are in."""
        end = start + result.numel()
        for chunk in group.overlapping(start, end):
            offset = chunk["start"]
            first, last = max(start, offset), min(end, offset + chunk["length"])
            self._read_into(chunk, first - offset, result[first - start : last - start])

    def _read_other_shard(self, group: ShardChunks, wanted: list[Rectangle], start: int, result: torch.Tensor) -> None:
        """Read what chunks of another shard hold of the wanted rectangles, whose offsets count from `start`."""
        left, right = group.shard.columns
        for target in wanted:
            if target.column_start >= right or target.column_stop <= left:
                continue
            for chunk in group.overlapping(*group.local_range(target.row_start, target.row_stop)):
                for source in group.shard.rectangles(chunk["start"], chunk["length"]):
                    self._copy_overlap(chunk, source, target, result[target.offset - start :])

    def _copy_overlap(self, chunk: ChunkEntry, source: Rectangle, target: Rectangle, result: torch.Tensor) -> None:
        """Read the elements that both rectangles hold; `result` begins with the target's first element."""
        top, bottom = max(source.row_start, target.row_start), min(source.row_stop, target.row_stop)
        left, right = max(source.column_start, target.column_start), min(source.column_stop, target.column_stop)
        width = right - left
        if top >= bottom or width <= 0:
            return
        first = source.offset - chunk["start"] + (top - source.row_start) * source.width + left - source.column_start
        offset = (top - target.row_start) * target.width + left - target.column_start
        if width == source.width == target.width or bottom - top == 1:
            self._read_into(chunk, first, result[offset : offset + (bottom - top) * width])
            return
        rows_at_once = max(1, READ_ELEMENTS // source.width)
        for row in range(top, bottom, rows_at_once):
            count = min(rows_at_once, bottom - row)
            band = self._band(chunk, first + (row - top) * source.width, count, source.width, width)
            into = result.as_strided(
                (count, width), (target.width, 1), result.storage_offset() + offset + (row - top) * target.width
            )
            into.copy_(band)

    def _band(self, chunk: ChunkEntry, first: int, count: int, stride: int, width: int) -> torch.Tensor:
        """Read `count` rows of `width` elements that begin `stride` apart in one call: [count, width]."""
        import torch

        flat = torch.empty((count - 1) * stride + width, dtype=torch.float32)
        self._read_into(chunk, first, flat)
        return flat.as_strided((count, width), (stride, 1))

    def _read_into(self, chunk: ChunkEntry, first: int, target: torch.Tensor) -> None:
        self._file(chunk["file"]).read_into(chunk["key"], chunk["length"], first, target)

    def _file(self, name: str) -> TensorFileReader:
        """Return an open file; at most OPEN_FILES are open, and the headers of all are kept."""
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        if len(self._open) >= OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        if name not in self._files:
            self._files[name] = TensorFileReader(self.path / name)
        file = self._files[name]
        file.open()
        self._open[name] = file
        return file


def _numbers(values: Any) -> dict[str, float]:
    """Return a mapping of names to finite numbers; raise ValueError for anything else."""
    for name, value in values.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"scalars: {name} is {value!r}, expected a number")
    return dict(values)
