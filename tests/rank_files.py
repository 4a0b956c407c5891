"""Checkpoints as the ranks of any layout would write them, without those ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ctxlm_ds.checkpoint.chunk_index import ChunkWriter, merge_index
from ctxlm_ds.checkpoint.manifest import hash_files, list_files, write_manifest
from ctxlm_ds.models.program import plain_program
from ctxlm_ds.parallel.placement import Shard, Split, shard_of
from ctxlm_ds.recipe.load import dump_config
from ctxlm_ds.recipe.schema import RunConfig
from tests.checkpoints import outputs_of, random_weights

KINDS = ("weight", "exp_avg", "exp_avg_sq")
STEP = 40
Values = dict[str, dict[str, torch.Tensor]]


def local_shape(shard: Shard) -> tuple[int, ...]:
    """Shape of the tensor that holds the shard; it has the parameter's dimensions if it has all columns."""
    if len(shard.shape) == 0:
        return ()
    all_columns = shard.num_columns == shard.matrix_shape[1]
    return (shard.num_rows, *(shard.shape[1:] if all_columns else (shard.num_columns,)))


@dataclass(frozen=True)
class Layout:
    """Sizes of the three parallel axes and the ZeRO stage."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    zero_stage: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def rank(self, stage: int, data: int, tensor: int) -> int:
        """Global rank: tensor-parallel neighbours first, then data-parallel ones, then stages."""
        return tensor + self.tensor_parallel_size * (data + self.data_parallel_size * stage)


class PlannedChunk(NamedTuple):
    """Elements start..start+length of a shard's local order."""

    name: str
    shard: Shard
    start: int
    length: int


def splits_of(config: RunConfig) -> dict[str, Split | None]:
    """Return how tensor-parallel ranks share each parameter."""
    facts = plain_program(config.model, outputs_of(config)).facts
    return {name: facts.split for name, facts in facts.items()}


def plan_chunks(
    shapes: Mapping[str, tuple[int, ...]], splits: Mapping[str, Split | None], layout: Layout
) -> Iterator[tuple[int, list[PlannedChunk]]]:
    """Every rank with the chunks that it writes, cut as DeepSpeed cuts: flat under ZeRO 1 and 2, each alone under 3."""
    names = list(shapes)
    stages, ranks = layout.pipeline_parallel_size, layout.data_parallel_size
    for stage in range(stages):
        held = names[len(names) * stage // stages : len(names) * (stage + 1) // stages]
        for tensor in range(layout.tensor_parallel_size):
            own = [name for name in held if tensor == 0 or splits[name] is not None]
            sharers = layout.tensor_parallel_size
            shards = {name: shard_of(name, splits[name], shapes[name], sharers, tensor) for name in own}
            chunks: list[list[PlannedChunk]] = [[] for _ in range(ranks)]
            width, begin = -(-sum(shard.num_elements for shard in shards.values()) // ranks), 0
            for index, (name, shard) in enumerate(shards.items()):
                size = shard.num_elements
                if layout.zero_stage == 0:
                    cuts = [(index % ranks, 0, size)]
                elif layout.zero_stage == 3:
                    part = -(-size // ranks)
                    cuts = [(data, data * part, min(size, (data + 1) * part)) for data in range(ranks)]
                else:
                    cuts = [(data, data * width - begin, (data + 1) * width - begin) for data in range(ranks)]
                for data, start, stop in cuts:
                    start, stop = max(0, start), min(size, stop)
                    if start < stop:
                        chunks[data].append(PlannedChunk(name, shard, start, stop - start))
                begin += size
            for data in range(ranks):
                yield layout.rank(stage, data, tensor), chunks[data]


def random_states(config: RunConfig) -> Values:
    """Every weight and moment by name and kind; second moments are positive."""
    found: Values = {name: {"weight": value} for name, value in random_weights(config).items()}
    for seed, kind in enumerate(KINDS[1:], 1):
        for name, value in random_weights(config, seed).items():
            found[name][kind] = value.square() if kind == "exp_avg_sq" else value
    return found


def write_as_ranks(run: Path, config: RunConfig, values: Values, layout: Layout, tokenizer: Path) -> Path:
    """A run with one checkpoint, as the ranks of a layout would write it."""
    folder = run / "checkpoints" / f"step-{STEP:08d}"
    (folder / "tokenizer").mkdir(parents=True)
    shapes = {name: tuple(kinds["weight"].shape) for name, kinds in values.items()}
    parts = []
    for rank, chunks in plan_chunks(shapes, splits_of(config), layout):
        writer = ChunkWriter(folder, rank)
        for name, shard, start, length in chunks:
            for kind in KINDS:
                local = shard.extract(values[name][kind])
                writer.add(name, kind, shapes[name], start, local[start : start + length], shard)
        parts.append(writer.write().value)
    merge_index(folder, parts, {"optimizer_updates": STEP})
    for path in tokenizer.iterdir():
        (folder / "tokenizer" / path.name).write_bytes(path.read_bytes())
    state = {"train_state": {"step": STEP, "rows_consumed": 800}, "data": {"train_rows": 9}, "environment": {}}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "config.yaml").write_text(dump_config(config))
    write_manifest(folder, STEP, hash_files(folder, list_files(folder)))
    (run / "metrics.jsonl").write_text('{"step": 40, "loss": 1.0}\n')
    return run


def checkpoint_of(run: Path) -> Path:
    """The run's only checkpoint."""
    return run / "checkpoints" / f"step-{STEP:08d}"
