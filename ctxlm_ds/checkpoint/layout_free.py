"""The layout-free form: per full parameter name the fp32 weight and the optimizer's moments, in pieces.

Each rank writes the pieces it owns, one flat fp32 tensor each, into one safetensors file for weights and one for
moments; index.json says which piece covers which flat range of which parameter, or of which tensor-parallel shard of
it. So every layout writes in parallel, and any other reads it back a range at a time.
In: a checkpoint's folder. Out: ranges of parameters or of shards. Not here: writing (pieces.py), which rank owns
what (training/fragments.py, parallel/placement.py), sizes and checksums (manifest.py).
"""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.checkpoint.pieces import (
    CARRIED_KIND,
    HEADER_ROOM_BYTES,
    INDEX_NAME,
    WEIGHT_KIND,
    ParameterPieces,
    Piece,
    PieceWriter,
    ShardPieces,
    check_shape,
    estimate_bytes,
    group_pieces,
    merge_index,
)
from ctxlm_ds.checkpoint.tensor_file import FP32_BYTES, TensorFileReader
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.parallel.shards import Rectangle, Shard

if TYPE_CHECKING:
    import torch

__all__ = [
    "HEADER_ROOM_BYTES", "INDEX_NAME", "OPEN_FILES", "WEIGHT_KIND", "CheckpointReader", "ParameterPieces",
    "PieceWriter", "estimate_bytes", "merge_index",
]  # fmt: skip

OPEN_FILES = 64
READ_ELEMENTS = 1 << 21
"""Largest part of a piece that is held beside the result, where rows are read only in part (8 MiB)."""


class CheckpointReader:
    """Reads any range of any shard of any parameter of a checkpoint, without loading more than that.

    Args:
        path: a checkpoint's folder (RUN/checkpoints/step-…).

    Raises:
        CheckpointError: no index, a damaged one, or pieces that do not cover a parameter exactly once.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, TensorFileReader] = {}
        self._open: OrderedDict[str, TensorFileReader] = OrderedDict()
        self._groups: dict[str, dict[str, list[ShardPieces]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._elements_in_file: dict[str, int] = {}
        index_path = self.path / INDEX_NAME
        try:
            index = json.loads(index_path.read_text(encoding="utf-8"))
            self._scalars: dict[str, Any] = dict(index["scalars"])
            self._take(index["parameters"])
        except FileNotFoundError:
            raise CheckpointError(f"{self.path}: no {INDEX_NAME}, so this is not a checkpoint folder") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index_path}: damaged ({type(error).__name__}: {error})") from None

    def names(self) -> list[str]:
        """Full names of all parameters."""
        return [name for name in self._shapes if CARRIED_KIND not in self._groups[name]]

    def carried_names(self) -> list[str]:
        """Names of what layers carry from step to step, `NAME.MICROBATCH`."""
        return [name for name in self._shapes if CARRIED_KIND in self._groups[name]]

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        self._check_name(name)
        return self._shapes[name]

    def kinds(self, name: str) -> list[str]:
        """What is stored of a parameter: `weight` and the optimizer's moments."""
        self._check_name(name)
        return sorted(self._groups[name], key=lambda kind: (kind != WEIGHT_KIND, kind))

    def moment_kinds(self) -> list[str]:
        """Kinds of moments that any parameter has, such as `exp_avg` and `exp_avg_sq`."""
        found = {kind for kinds in self._groups.values() for kind in kinds}
        return sorted(found - {WEIGHT_KIND, CARRIED_KIND})

    def scalars(self) -> dict[str, Any]:
        """The values that belong to no parameter, as they were saved."""
        return dict(self._scalars)

    def num_elements(self, name: str) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape(name))

    def read(
        self, name: str, kind: str = WEIGHT_KIND, start: int = 0, length: int | None = None, shard: Shard | None = None
    ) -> torch.Tensor:
        """Elements start..start+length of a shard's flat local order as 1-D fp32 on the CPU.

        Args:
            name: the parameter's full name.
            kind: `weight`, `exp_avg`, `exp_avg_sq`, …
            start: first element.
            length: number of elements; None reads to the end.
            shard: what the range is one of, however the checkpoint is cut; None for the whole parameter.

        Raises:
            CheckpointError: no such parameter or kind, a range outside it, or a file that is missing or damaged.
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
        """The whole parameter in its shape, fp32 on the CPU."""
        return self.read(name, kind).reshape(self.shape(name))

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _take(self, parameters: ParameterPieces) -> None:
        """Check every piece of the index and keep it by shard."""
        for name, parameter in parameters.items():
            where = f"{self.path}: {name}"
            shape = self._shapes[name] = check_shape(where, parameter["shape"])
            groups = self._groups[name] = {}
            for kind, pieces in parameter["pieces"].items():
                groups[kind] = group_pieces(f"{where} ({kind})", shape, pieces)
                for piece in pieces:
                    self._take_piece(f"{name} ({kind})", piece)

    def _take_piece(self, where: str, piece: Piece) -> None:
        file, key = piece["file"], piece["key"]
        if not isinstance(file, str) or not isinstance(key, str):
            raise ValueError(f"{where}: file {file!r}, key {key!r}")
        if file not in self._elements_in_file and (Path(file).name != file or "\0" in file):
            raise ValueError(f"{where}: file {file!r} is not in the checkpoint's folder")
        self._elements_in_file[file] = self._elements_in_file.get(file, 0) + piece["length"]

    def _check_name(self, name: str) -> None:
        if name not in self._shapes:
            raise CheckpointError(f"{self.path}: no parameter {name!r} in this checkpoint")

    def _check_files(self, group: ShardPieces, wanted: list[Rectangle]) -> None:
        """Before room is made for a result: the files are long enough to hold what the index says of them."""
        for rectangle in wanted:
            for piece in group.overlapping(*group.local_range(rectangle.row_start, rectangle.row_stop)):
                elements = self._elements_in_file.get(piece["file"], 0)
                if elements:
                    self._check_file(piece, elements)

    def _check_file(self, piece: Piece, elements: int) -> None:
        path = self.path / piece["file"]
        try:
            size_bytes = os.stat(path).st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing; verify the checkpoint or use the one before it") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot read {piece['key']} ({error})") from None
        if size_bytes < elements * FP32_BYTES:
            raise CheckpointError(f"{path}: cannot read {piece['key']} ({size_bytes} bytes, it must have more)")
        # Once is enough: what it says of a file that shrinks later is said by the read.
        self._elements_in_file[piece["file"]] = 0

    def _read_same_shard(self, group: ShardPieces, start: int, result: torch.Tensor) -> None:
        """A flat range of the very order that the pieces are in."""
        end = start + result.numel()
        for piece in group.overlapping(start, end):
            offset = piece["start"]
            first, last = max(start, offset), min(end, offset + piece["length"])
            self._read_into(piece, first - offset, result[first - start : last - start])

    def _read_other_shard(self, group: ShardPieces, wanted: list[Rectangle], start: int, result: torch.Tensor) -> None:
        """What pieces of another shard hold of the wanted rectangles, whose offsets count from `start`."""
        left, right = group.shard.columns
        for target in wanted:
            if target.column_start >= right or target.column_stop <= left:
                continue
            for piece in group.overlapping(*group.local_range(target.row_start, target.row_stop)):
                for source in group.shard.rectangles(piece["start"], piece["length"]):
                    self._copy_overlap(piece, source, target, result[target.offset - start :])

    def _copy_overlap(self, piece: Piece, source: Rectangle, target: Rectangle, result: torch.Tensor) -> None:
        """The elements that both rectangles hold; `result` begins with the target's first element."""
        top, bottom = max(source.row_start, target.row_start), min(source.row_stop, target.row_stop)
        left, right = max(source.column_start, target.column_start), min(source.column_stop, target.column_stop)
        width = right - left
        if top >= bottom or width <= 0:
            return
        first = source.offset - piece["start"] + (top - source.row_start) * source.width + left - source.column_start
        place = (top - target.row_start) * target.width + left - target.column_start
        if width == source.width == target.width or bottom - top == 1:
            self._read_into(piece, first, result[place : place + (bottom - top) * width])
            return
        rows_at_once = max(1, READ_ELEMENTS // source.width)
        for row in range(top, bottom, rows_at_once):
            count = min(rows_at_once, bottom - row)
            band = self._band(piece, first + (row - top) * source.width, count, source.width, width)
            into = result.as_strided(
                (count, width), (target.width, 1), result.storage_offset() + place + (row - top) * target.width
            )
            into.copy_(band)

    def _band(self, piece: Piece, first: int, count: int, stride: int, width: int) -> torch.Tensor:
        """`count` rows of `width` elements that begin `stride` apart, read in one go: [count, width]."""
        import torch

        flat = torch.empty((count - 1) * stride + width, dtype=torch.float32)
        self._read_into(piece, first, flat)
        return flat.as_strided((count, width), (stride, 1))

    def _read_into(self, piece: Piece, first: int, target: torch.Tensor) -> None:
        self._file(piece["file"]).read_into(piece["key"], piece["length"], first, target)

    def _file(self, name: str) -> TensorFileReader:
        """The file, open; its header is kept when others push it out."""
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
