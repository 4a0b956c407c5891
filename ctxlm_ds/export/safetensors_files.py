"""Weight files of a Hugging Face folder: sharded writing, and reading, of one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from pydantic import ByteSize, TypeAdapter, ValidationError
from safetensors import safe_open

from ctxlm_ds.checkpoint.chunk_index import CODE_BYTES, TensorFileWriter
from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.hf_config import INDEX_FILE, SINGLE_FILE, tensor_shapes
from ctxlm_ds.export.key_maps import KeyMap, Shape, WeightSource
from ctxlm_ds.kernels.dispatch import DTYPES

HEADS_FILE = "extra_heads.safetensors"
"""Heads of an objective that the Hugging Face class lacks, under our names; only `initialize_from` reads them."""
DEFAULT_SHARD_BYTES = 5 * 10**9
DTYPE_CODES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}


def parse_size(text: str) -> int:
    """Return a size in bytes (`5GB` -> 5,000,000,000); raise ExportError if it is not a positive number and a unit."""
    try:
        size = TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        size = ByteSize(0)
    if size <= 0:
        raise ExportError(f"{text!r} is not a size; give a number and a unit such as 500MB, 5GB or 4GiB")
    return size


def plan_shards(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Divide tensors, in order, into files of at most `max_shard_bytes`; a larger tensor gets a separate file."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_model(
    folder: Path, key_map: KeyMap, source: WeightSource, dtype: str = "fp32", max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> None:
    """Write weights in the order of the table, with one parameter of ours in memory at a time.

    `folder` gets model.safetensors, or shards of at most `max_shard_bytes` with their index. Raises ExportError if a
    value is not finite in `dtype` (fp32, bf16 or fp16).
    """
    their_shapes = ((row, row.their_shapes(source.shape(row.ours))) for row in key_map.rows)
    shapes = {name: shape for row, found in their_shapes for name, shape in zip(row.theirs, found, strict=True)}
    sizes = {name: math.prod(shape) * CODE_BYTES[DTYPE_CODES[dtype]] for name, shape in shapes.items()}
    shards = plan_shards(sizes, max_shard_bytes)
    values = (value for row in key_map.rows for value in row.to_theirs(source.read_full(row.ours)))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        path = folder / (SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        file = TensorFileWriter(path, DTYPE_CODES[dtype])
        for name in shard:
            file.add(name, shapes[name], partial(_next_tensor, values, name, dtype))
        file.write()
        weight_map |= dict.fromkeys(shard, path.name)
    if len(shards) > 1:
        metadata = {"total_parameters": sum(map(math.prod, shapes.values())), "total_size": sum(sizes.values())}
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_heads(folder: Path, source: WeightSource, names: Sequence[str], dtype: str) -> None:
    """Write parameters under our names into HEADS_FILE. Raises ExportError if a value is not finite in `dtype`."""
    file = TensorFileWriter(folder / HEADS_FILE, DTYPE_CODES[dtype])
    values = (source.read_full(name) for name in names)
    for name in names:
        file.add(name, source.shape(name), partial(_next_tensor, values, name, dtype))
    file.write()


def _next_tensor(values: Iterator[torch.Tensor], name: str, dtype: str) -> torch.Tensor:
    value = next(values)
    converted = value.to(DTYPES[dtype])
    if not bool(torch.isfinite(converted).all()):
        raise ExportError(
            f"{name} is not finite in {dtype} (largest magnitude {float(value.abs().max()):g}): export with "
            "--dtype fp32 or bf16, or from a checkpoint before the run diverged"
        )
    return converted


class SafetensorsFiles:
    """The tensors of safetensors files, read one at a time."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read the names and shapes; raise ExportError if a file is damaged."""
        found = tensor_shapes(paths)
        self._files = {name: path for name, (path, _) in found.items()}
        self.shapes: dict[str, Shape] = {name: shape for name, (_, shape) in found.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor in fp32; raise ExportError if it is not floating point."""
        with safe_open(self._files[name], framework="pt") as handle:
            value = handle.get_tensor(name)
        if not value.is_floating_point():
            raise ExportError(f"{self._files[name]}: {name} is {value.dtype}, not a floating-point tensor")
        return value.float()
