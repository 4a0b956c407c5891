"""The writer of one rank's files of a checkpoint: chunks of weights, of moments, and of carried tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.checkpoint.chunk_index import CARRIED_KIND, WEIGHT_KIND, ParameterChunks
from ctxlm_ds.checkpoint.manifest import FileEntry
from ctxlm_ds.checkpoint.tensor_file import LazyTensor, TensorFileWriter
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.parallel.placement import Shard

if TYPE_CHECKING:
    import torch

FILE_STEMS = {WEIGHT_KIND: "weights", CARRIED_KIND: "carried"}


@dataclass(frozen=True)
class WrittenFiles:
    """A rank's files, flushed to the disk and hashed, and what rank 0 needs of them."""

    value: Any
    files: Mapping[str, FileEntry]


class ChunkWriter:
    """Writer of weights-RANK.safetensors, moments-RANK and carried-RANK in a folder."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._files: dict[str, TensorFileWriter] = {}
        self._parameters: ParameterChunks = {}

    def add(
        self,
        name: str,
        kind: str,
        shape: Sequence[int],
        start: int,
        values: torch.Tensor | LazyTensor,
        shard: Shard | None = None,
    ) -> None:
        """List one chunk, which `write` writes; an empty one is left out.

        Args:
            name: the parameter's full name.
            kind: `weight`, `carried`, or a moment such as `exp_avg` and `exp_avg_sq`.
            shape: of the full parameter.
            start: offset of the chunk in the shard's flat local order (of a full parameter: row-major).
            values: its elements, saved as fp32.
            shard: what the chunk is a range of; None for the full parameter.

        Raises:
            CheckpointError: the chunk does not fit the parameter.
        """
        where = f"{name} ({kind})"
        if not isinstance(values, LazyTensor):
            values = LazyTensor(values.numel(), values.detach)
        shard = shard or Shard.whole(shape)
        if shard.shape != tuple(shape):
            raise CheckpointError(f"{where}: a shard of shape {shard.shape}, the parameter has {tuple(shape)}")
        if start < 0 or start + values.length > shard.num_elements:
            of = f"its shape {tuple(shape)}" if shard.is_whole else f"its shard of {shard.num_elements}"
            raise CheckpointError(f"{where}: elements {start}..{start + values.length} are outside {of}")
        parameter = self._parameters.setdefault(name, {"shape": list(shape), "pieces": {}})
        if values.length == 0:
            return
        path = self._directory / f"{FILE_STEMS.get(kind, 'moments')}-{self._rank:05d}.safetensors"
        file = self._files.setdefault(path.name, TensorFileWriter(path))
        base = name if kind == WEIGHT_KIND else f"{name}#{kind}"
        # A second chunk is named by its start as well, and counted if shards share that start.
        keys = chain([base, f"{base}@{start}"], (f"{base}@{start}+{number}" for number in count(2)))
        key = next(free for free in keys if free not in file)
        file.add(key, (values.length,), lambda: values.read().detach().cpu().float())
        chunk = {"file": path.name, "key": key, "start": start, "length": values.length}
        if not shard.is_whole:
            chunk["shard"] = shard.to_json()
        parameter["pieces"].setdefault(kind, []).append(chunk)

    def write(self, check: Callable[[], None] = lambda: None) -> WrittenFiles:
        """Write, flush and hash the files, with one chunk in memory at a time; `check` may raise to end the writing.

        Returns the files with this rank's part of the index: {name: {"shape", "pieces": {kind: [chunk]}}}.
        """
        files = {name: file.write(check) for name, file in self._files.items()}
        return WrittenFiles(self._parameters, files)

