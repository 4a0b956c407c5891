"""Checkpoints as the ranks of any layout would write them, without those ranks."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from ctxlm_ds.checkpoint.layout_free import PieceWriter, merge_index
from ctxlm_ds.checkpoint.manifest import hash_files, list_files, write_manifest
from ctxlm_ds.checkpoint.target_layout import Layout, plan_pieces
from ctxlm_ds.recipe.load import dump_config
from ctxlm_ds.recipe.schema import RunConfig
from tests.checkpoints import random_weights

KINDS = ("weight", "exp_avg", "exp_avg_sq")
STEP = 40
Values = dict[str, dict[str, torch.Tensor]]


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
    for rank, pieces in plan_pieces(config, shapes, layout):
        writer = PieceWriter(folder, rank, header_room_bytes=1 << 13)
        for name, shard, start, length in pieces:
            for kind in KINDS:
                local = shard.extract(values[name][kind])
                writer.add(name, kind, shapes[name], start, local[start : start + length], shard)
        parts.append(writer.close())
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
