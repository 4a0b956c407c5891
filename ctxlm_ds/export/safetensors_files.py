"""Safetensors files one tensor at a time: sharded writing and reading that never hold a whole model.

The file format is that of the safetensors library (8 bytes of header length, a JSON header, the tensors' bytes); the
library writes only from a dictionary of all tensors, which for a shard of 5 GB is 5 GB of memory.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ctxlm_ds.errors import ExportError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPE_CODES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
SIZE_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class TensorSpec:
    """Name and shape of a tensor to be written."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def parse_size(text: str) -> int:
    """`5GB` -> 5,000,000,000 bytes; ExportError for anything but a positive number and a unit."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = SIZE_UNITS.get((match[2] or "B").upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size <= 0:
        raise ExportError(f"{text!r} is no size; give a number and a unit such as 500MB, 5GB or 4GiB")
    return size


def plan_shards(specs: Sequence[TensorSpec], dtype: str, max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Consecutive tensors in files of at most `max_shard_bytes`; a larger tensor gets a file of its own."""
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        size = spec.elements * DTYPE_BYTES[dtype]
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += size
    return shards


def write_model(
    folder: Path, shards: Sequence[Sequence[TensorSpec]], values: Iterable[torch.Tensor], dtype: str
) -> list[Path]:
    """Write the tensors of `values`, in the order of `shards`, as model.safetensors or as shards with their index."""
    stream = iter(values)
    if len(shards) == 1:
        path = folder / SINGLE_FILE
        write_file(path, shards[0], stream, dtype)
        return [path]
    paths = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(path, shard, stream, dtype)
        weight_map |= {spec.name: path.name for spec in shard}
        paths.append(path)
    elements = sum(spec.elements for shard in shards for spec in shard)
    metadata = {"total_parameters": elements, "total_size": elements * DTYPE_BYTES[dtype]}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return paths


def write_file(path: Path, specs: Sequence[TensorSpec], values: Iterator[torch.Tensor], dtype: str) -> None:
    """Write one file, taking one tensor for each of `specs` from `values`."""
    with open(path, "wb") as handle:
        handle.write(_header(specs, dtype))
        for spec in specs:
            value = next(values)
            if tuple(value.shape) != spec.shape:
                raise ExportError(f"{spec.name} has shape {tuple(value.shape)}, planned as {spec.shape}")
            handle.write(_tensor_bytes(value, dtype, spec.name))


def _header(specs: Sequence[TensorSpec], dtype: str) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for spec in specs:
        end = begin + spec.elements * DTYPE_BYTES[dtype]
        entries[spec.name] = {"dtype": DTYPE_CODES[dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _tensor_bytes(value: torch.Tensor, dtype: str, name: str) -> memoryview:
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    converted = value.to(torch_dtype).contiguous()
    if not bool(torch.isfinite(converted).all()):
        largest = float(value.abs().max())
        raise ExportError(
            f"{name} is not finite in {dtype} (largest magnitude {largest:g}): export with --dtype fp32 or bf16, "
            "or from a checkpoint before the run diverged"
        )
    return memoryview(converted.view(-1).view(torch.uint8).numpy())


class SafetensorsFolder:
    """The tensors of a local Hugging Face folder: model.safetensors or its shards, read one at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises ExportError where the folder holds no complete safetensors files."""
        self.folder = folder
        self._files = _locate(folder)

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as handle:
            return tuple(handle.get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        """The tensor in fp32; ExportError where it is not floating point."""
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as handle:
            value = handle.get_tensor(name)
        if not value.is_floating_point():
            raise ExportError(f"{self._files[name]}: {name} is {value.dtype}, not a floating-point tensor")
        return value.float()


def _locate(folder: Path) -> dict[str, Path]:
    """Name of each tensor -> its file."""
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            file_names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ExportError(f"{index} is no index of safetensors files ({error!r}): copy it again") from error
        paths = [folder / name for name in file_names]
    elif (folder / SINGLE_FILE).is_file():
        paths = [folder / SINGLE_FILE]
    else:
        raise ExportError(_no_safetensors(folder))
    located: dict[str, Path] = {}
    for path in paths:
        if not path.is_file():
            raise ExportError(f"{path} is missing although {index.name} lists it: copy the folder again")
        located |= {name: path for name in _names_in(path)}
    return located


def _names_in(path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as handle:
            return list(handle.keys())
    except SafetensorError as error:
        raise ExportError(f"{path} is damaged ({error}): copy it again") from error


def _no_safetensors(folder: Path) -> str:
    pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickled:
        return (
            f"{folder} holds its weights as a pickle ({pickled[0]}), which can run any code when it is read; "
            "where you trust its source, load it once with transformers' from_pretrained and save it with "
            "save_pretrained, which writes model.safetensors, then give that folder"
        )
    return f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: give a folder written by save_pretrained"
