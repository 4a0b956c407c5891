"""The layout-free form: per full parameter name the fp32 weight and the optimizer's moments, in pieces.

Each rank writes the pieces it owns, one flat fp32 tensor each, into one safetensors file for weights and one for
moments; index.json says which piece covers which flat range of which parameter. So every layout writes in parallel,
and any other reads it back a range at a time. In: flat pieces. Out: folders that CheckpointReader opens.
Not here: which rank owns what (training/engine.py), sizes and checksums (manifest.py).
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ctxlm_ds.atomic import write_text
from ctxlm_ds.errors import CheckpointError

if TYPE_CHECKING:
    import torch

INDEX_NAME = "index.json"
WEIGHT_KIND = "weight"
FP32_BYTES = 4
OPEN_FILES = 64
# Room for the header of about 2,000 pieces; a longer header costs one more copy of the file.
HEADER_ROOM_BYTES = 1 << 18

Piece = dict[str, Any]
ParameterPieces = dict[str, dict[str, Any]]


def estimate_bytes(num_elements: int, num_kinds: int = 3) -> int:
    """Bytes that a rank will write for `num_elements` parameters in `num_kinds` kinds (weight and two moments)."""
    return num_elements * num_kinds * FP32_BYTES + 2 * HEADER_ROOM_BYTES


class _TensorFile:
    """A safetensors file written tensor by tensor, so that a rank never holds a second copy of what it saves.

    The format wants its header first; the room for it is kept free and padded with spaces, as the format allows.
    """

    def __init__(self, path: Path, header_room_bytes: int) -> None:
        self.path = path
        self._room_bytes = header_room_bytes
        self._entries: dict[str, dict[str, Any]] = {}
        self._data_bytes = 0
        self._file: BinaryIO = open(path, "xb")  # noqa: SIM115 (closed by close)
        self._file.seek(8 + header_room_bytes)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def append(self, key: str, flat: torch.Tensor) -> None:
        data = memoryview(flat.numpy()).cast("B")
        self._file.write(data)
        self._entries[key] = {
            "dtype": "F32",
            "shape": [flat.numel()],
            "data_offsets": [self._data_bytes, self._data_bytes + data.nbytes],
        }
        self._data_bytes += data.nbytes

    def close(self) -> None:
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._entries}, separators=(",", ":")).encode()
        if len(header) > self._room_bytes:
            self._widen(len(header))
        header = header.ljust(self._room_bytes)
        self._file.seek(0)
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._file.close()

    def _widen(self, room_bytes: int) -> None:
        self._file.close()
        narrow = self.path.with_name(self.path.name + ".narrow")
        os.replace(self.path, narrow)
        self._file = open(self.path, "xb")  # noqa: SIM115 (closed by close)
        with open(narrow, "rb") as source:
            source.seek(8 + self._room_bytes)
            self._room_bytes = -(-room_bytes // 8) * 8
            self._file.seek(8 + self._room_bytes)
            shutil.copyfileobj(source, self._file, 1 << 22)
        narrow.unlink()


class PieceWriter:
    """Writes one rank's pieces: weights-RRRRR.safetensors and moments-RRRRR.safetensors in `directory`.

    Args:
        directory: an existing folder, the same for all ranks.
        rank: names the files.
        header_room_bytes: space reserved for each file's header.
    """

    def __init__(self, directory: Path, rank: int, header_room_bytes: int = HEADER_ROOM_BYTES) -> None:
        self._directory = directory
        self._rank = rank
        self._room_bytes = header_room_bytes
        self._files: dict[str, _TensorFile] = {}
        self._parameters: ParameterPieces = {}

    def add(self, name: str, kind: str, shape: Sequence[int], start: int, values: torch.Tensor) -> None:
        """Write one piece; an empty one is left out.

        Args:
            name: the parameter's full name.
            kind: `weight`, or a moment such as `exp_avg` and `exp_avg_sq`.
            shape: of the whole parameter.
            start: offset of the piece in the row-major flat parameter.
            values: 1-D fp32, on any device; copied to the CPU and written at once.

        Raises:
            CheckpointError: the piece does not fit the parameter, or is not flat fp32.
        """
        import torch

        where = f"{name} ({kind})"
        if values.dtype != torch.float32 or values.dim() != 1:
            raise CheckpointError(f"{where}: a piece is 1-D float32, got {values.dim()}-D {values.dtype}")
        length = values.numel()
        if start < 0 or start + length > math.prod(shape):
            raise CheckpointError(f"{where}: elements {start}..{start + length} lie outside its shape {tuple(shape)}")
        parameter = self._parameters.setdefault(name, {"shape": list(shape), "pieces": {}})
        if parameter["shape"] != list(shape):
            raise CheckpointError(f"{where}: shape {tuple(shape)}, before it was {tuple(parameter['shape'])}")
        if length == 0:
            return
        file = self._file("weights" if kind == WEIGHT_KIND else "moments")
        key = name if kind == WEIGHT_KIND else f"{name}#{kind}"
        if key in file:
            key = f"{key}@{start}"
        file.append(key, values.detach().to("cpu").contiguous())
        piece = {"file": file.path.name, "key": key, "start": start, "length": length}
        parameter["pieces"].setdefault(kind, []).append(piece)

    def close(self) -> ParameterPieces:
        """Finish the files; this rank's part of the index: {name: {"shape", "pieces": {kind: [piece]}}}."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        return self._parameters

    def _file(self, stem: str) -> _TensorFile:
        if stem not in self._files:
            path = self._directory / f"{stem}-{self._rank:05d}.safetensors"
            self._files[stem] = _TensorFile(path, self._room_bytes)
        return self._files[stem]


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
        for kind, listed in parameter["pieces"].items():
            listed.sort(key=lambda piece: piece["start"])
            _check_cover(f"{name} ({kind})", math.prod(parameter["shape"]), listed)
        if WEIGHT_KIND not in parameter["pieces"] and math.prod(parameter["shape"]):
            raise CheckpointError(f"{name}: no rank wrote its weight")
    index = {"parameters": dict(sorted(parameters.items())), "scalars": dict(scalars)}
    write_text(directory / INDEX_NAME, json.dumps(index, separators=(",", ":")) + "\n")
    return index


def _check_cover(where: str, num_elements: int, pieces: Sequence[Piece]) -> None:
    """Pieces in ascending order must cover 0..num_elements exactly once."""
    end = 0
    for piece in pieces:
        start, length = int(piece["start"]), int(piece["length"])
        if length <= 0 or start < end:
            raise CheckpointError(f"{where}: pieces overlap at element {start} ({piece['file']})")
        if start > end:
            raise CheckpointError(f"{where}: elements {end}..{start} are in no piece")
        end = start + length
    if end != num_elements:
        problem = "are in no piece" if end < num_elements else "lie outside its shape"
        raise CheckpointError(f"{where}: elements {min(end, num_elements)}..{max(end, num_elements)} {problem}")


class CheckpointReader:
    """Reads any range of any parameter of a checkpoint, without loading more than that.

    Args:
        path: a checkpoint's folder (RUN/checkpoints/step-…).

    Raises:
        CheckpointError: no index, a damaged one, or pieces that do not cover a parameter exactly once.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open: OrderedDict[str, Any] = OrderedDict()
        index_path = self.path / INDEX_NAME
        try:
            index = json.loads(index_path.read_text(encoding="utf-8"))
            self._parameters: ParameterPieces = index["parameters"]
            self._scalars: dict[str, Any] = dict(index["scalars"])
            self._check()
        except FileNotFoundError:
            raise CheckpointError(f"{self.path}: no {INDEX_NAME}, so this is not a checkpoint folder") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index_path}: damaged ({type(error).__name__}: {error})") from None

    def names(self) -> list[str]:
        """Full names of all parameters."""
        return list(self._parameters)

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return tuple(self._parameter(name)["shape"])

    def kinds(self, name: str) -> list[str]:
        """What is stored of a parameter: `weight` and the optimizer's moments."""
        return sorted(self._parameter(name)["pieces"], key=lambda kind: (kind != WEIGHT_KIND, kind))

    def moment_kinds(self) -> list[str]:
        """Kinds of moments that any parameter has, such as `exp_avg` and `exp_avg_sq`."""
        found = {kind for parameter in self._parameters.values() for kind in parameter["pieces"]}
        return sorted(found - {WEIGHT_KIND})

    def scalars(self) -> dict[str, Any]:
        """The values that belong to no parameter, as they were saved."""
        return dict(self._scalars)

    def num_elements(self, name: str) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape(name))

    def read(self, name: str, kind: str = WEIGHT_KIND, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Elements start..start+length of the row-major flat parameter as 1-D fp32 on the CPU.

        Args:
            name: the parameter's full name.
            kind: `weight`, `exp_avg`, `exp_avg_sq`, …
            start: first element.
            length: number of elements; None reads to the end.

        Raises:
            CheckpointError: no such parameter or kind, a range outside it, or a file that is missing or damaged.
        """
        import torch

        total = self.num_elements(name)
        end = total if length is None else start + length
        if not 0 <= start <= end <= total:
            raise CheckpointError(f"{self.path}: {name} has {total} elements, {start}..{end} was asked for")
        result = torch.empty(end - start, dtype=torch.float32)
        if start == end:
            return result
        pieces = self._parameter(name)["pieces"]
        if kind not in pieces:
            raise CheckpointError(f"{self.path}: {name} has no {kind!r} (there is: {', '.join(pieces)})")
        for piece in pieces[kind]:
            first = max(start, piece["start"])
            last = min(end, piece["start"] + piece["length"])
            if first < last:
                offset = piece["start"]
                result[first - start : last - start] = self._slice(piece, first - offset, last - offset)
        return result

    def read_full(self, name: str, kind: str = WEIGHT_KIND) -> torch.Tensor:
        """The whole parameter in its shape, fp32 on the CPU."""
        return self.read(name, kind).reshape(self.shape(name))

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        self._open.clear()

    def _check(self) -> None:
        for name, parameter in self._parameters.items():
            total = math.prod(parameter["shape"])
            for kind, pieces in parameter["pieces"].items():
                _check_cover(f"{self.path}: {name} ({kind})", total, pieces)
                for piece in pieces:
                    if Path(piece["file"]).name != piece["file"]:
                        raise ValueError(f"{name} ({kind}): file {piece['file']!r} is not in the checkpoint's folder")

    def _parameter(self, name: str) -> dict[str, Any]:
        if name not in self._parameters:
            raise CheckpointError(f"{self.path}: no parameter {name!r} in this checkpoint")
        return self._parameters[name]

    def _slice(self, piece: Piece, first: int, last: int) -> torch.Tensor:
        from safetensors import SafetensorError

        file = self.path / piece["file"]
        try:
            stored = self._file(piece["file"]).get_slice(piece["key"])
            if stored.get_shape() != [piece["length"]] or stored.get_dtype() != "F32":
                raise CheckpointError(
                    f"{file}: {piece['key']} is {stored.get_dtype()} {stored.get_shape()}, the index says "
                    f"F32 [{piece['length']}]"
                )
            return stored[first:last]
        except FileNotFoundError:
            raise CheckpointError(f"{file}: missing; verify the checkpoint or use the one before it") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: cannot read {piece['key']} ({error})") from None

    def _file(self, name: str) -> Any:
        if name in self._open:
            self._open.move_to_end(name)
        else:
            from safetensors import safe_open

            self._open[name] = safe_open(str(self.path / name), framework="pt")
            if len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)
        return self._open[name]
