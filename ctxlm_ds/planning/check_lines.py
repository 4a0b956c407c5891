"""Lines that describe a run which has only been checked: batch, layout, parameters, memory of a rank, steps and tokens.

`run_lines` imports no torch. `model_lines` asks a separate process, `python -m ctxlm_ds.planning.check_lines`, which
builds the model on the `meta` device.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ctxlm_ds.console import counted, run_command
from ctxlm_ds.planning.hardware import GIB, GPUS, Cluster
from ctxlm_ds.planning.layouts import Layout
from ctxlm_ds.recipe.layout import data_parallel_size
from ctxlm_ds.recipe.schema import RunConfig

MODEL_LIMIT_S = 120.0


def layout_of(config: RunConfig, zero_stage: int, world_size: int) -> Layout:
    """Return the layout that a recipe has on a number of ranks."""
    parallel, training = config.parallel, config.training
    return Layout(
        data=data_parallel_size(config, world_size),
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        zero_stage=zero_stage,
        micro_batch_size=training.micro_batch_size,
        recompute=training.activation_checkpointing,
        sequence_parallel=parallel.sequence_parallel,
    )


def run_lines(config: RunConfig, zero_stage: int, world_size: int, run_dir: Path) -> list[str]:
    """Return batch, layout, steps and run directory of a checked recipe; tokens are positions, padding included."""
    training, length = config.training, config.data.seq_length
    layout = layout_of(config, zero_stage, world_size)
    rows, micro_batches = training.global_batch_size, layout.num_micro_batches(training.global_batch_size)
    ramp = f", from {training.batch_size_at(0):,} rows (batch_ramp)" if training.batch_ramp else ""
    split = f"data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline}"
    extras = [
        name
        for name, on in (("sequence parallel", layout.sequence_parallel), ("recomputation", layout.recompute))
        if on
    ]
    tokens = training.rows_after(training.max_steps) * length
    limits = [
        *([f"at most {training.max_tokens:,} tokens"] if training.max_tokens is not None else []),
        *([f"at most {training.max_hours:g} hours"] if training.max_hours is not None else []),
    ]
    return [
        f"{config.name}: the recipe is valid for {counted(world_size, 'rank')}",
        f"  batch: {training.micro_batch_size} (micro) x {micro_batches} (accumulation) x {layout.data} (data ranks) = "
        f"{counted(rows, 'row')} = {rows * length:,} tokens{ramp}",
        f"  layout: {', '.join([split, *extras])}; ZeRO stage {zero_stage}; {training.precision}",
        f"  steps: {training.max_steps:,}, {tokens:,} tokens in all{''.join(f', {limit}' for limit in limits)}",
        f"  run directory: {run_dir}",
    ]


def model_lines(config: RunConfig, deepspeed: Mapping[str, Any], world_size: int) -> list[str]:
    """Return parameters and memory of a rank, or why they are unknown here.

    Args:
        config: the checked recipe.
        deepspeed: DeepSpeed's JSON as it was written.
        world_size: planned number of ranks.
    """
    if importlib.util.find_spec("torch") is None:
        return ["  parameters and memory: unknown, torch is not installed here"]
    asked = json.dumps({"config": config.model_dump(mode="json"), "deepspeed": deepspeed, "world_size": world_size})
    command = [sys.executable, "-m", "ctxlm_ds.planning.check_lines"]
    try:
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=MODEL_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return [f"  parameters and memory: unknown, the planner took more than {MODEL_LIMIT_S:.0f} s"]
    if done.returncode == 0:
        return done.stdout.splitlines()
    reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1].removeprefix("error: ")
    return [f"  parameters and memory: unknown, {reason}"]


def planned_model(config: RunConfig, deepspeed: Mapping[str, Any], world_size: int) -> list[str]:
    """Plan the layout of the recipe and return the lines of `model_lines`. Imports torch."""
    from ctxlm_ds.planning.plan import Planner

    stage = int(deepspeed.get("zero_optimization", {}).get("stage", 0))
    planner = Planner(config, Cluster(GPUS[0], 1, 1), {stage: dict(deepspeed)})
    memory = planner.memory(layout_of(config, stage, world_size))
    known = config.model.vocab_size is not None
    assumed = "" if known else " (with the published vocabulary; the run takes the tokenizer's)"
    parts = ", ".join(f"{name} {part / GIB:.2f}" for name, part in asdict(memory).items())
    return [
        f"  parameters: {planner.model.num_parameters:,}{assumed}",
        f"  memory of a rank, planned for a GPU: {memory.total / GIB:.2f} GiB ({parts})",
    ]


def main() -> None:
    """Read recipe, DeepSpeed's JSON and number of ranks from standard input and print the model's lines."""
    asked = json.load(sys.stdin)
    config = RunConfig.model_validate(asked["config"])
    sys.stdout.writelines(f"{line}\n" for line in planned_model(config, asked["deepspeed"], asked["world_size"]))


if __name__ == "__main__":
    run_command(main)
