"""Writing the layout-free form: each rank's pieces into files of its own, and the index over all of them.

In: flat fp32 ranges of parameters or of tensor-parallel shards. Out: safetensors files and index.json. Not here:
reading (layout_free.py), which rank owns what (training/fragments.py), sizes and checksums (manifest.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.atomic import write_text
from ctxlm_ds.checkpoint.manifest import FileEntry
from ctxlm_ds.checkpoint.piece_coverage import check_shape, group_pieces
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
