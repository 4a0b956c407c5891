"""Export of a checkpoint to DeepSpeed's universal format, without importing deepspeed.

The format (deepspeed/checkpoint/ds_to_universal.py and universal_checkpoint.py, 0.19) is a folder per step:

    latest_universal                               the step's folder
    global_stepN/zero/NAME/fp32.pt, exp_avg.pt …   {"param": full tensor}, or under ZeRO-3 the flat tensor itself
    global_stepN/zero/NAME/step.pt                 the optimizer's count (ZeRO 1 and 2)
    global_stepN/zero/optimizer_state.pt           settings of the parameter groups
    global_stepN/mp_rank_00_model_states.pt        counters and client state (zero_pp_rank_0_… under ZeRO-3)

In: a checkpoint. Out: such a folder; docs/checkpoints.md says which engines load it. Not here: reading one
(universal_import.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ctxlm_ds.atomic import output_folder
from ctxlm_ds.checkpoint.chunk_index import WEIGHT_KIND
from ctxlm_ds.checkpoint.folders import find_verified
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.checkpoint.saved_state import read_saved_state
from ctxlm_ds.checkpoint.tensor_file import FP32_BYTES
from ctxlm_ds.console import byte_progress, logger
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.models.build import WholeModel, describe_model
from ctxlm_ds.parallel.placement import Split
from ctxlm_ds.recipe.load import load_saved_config
from ctxlm_ds.registry import OBJECTIVES

LATEST_NAME = "latest_universal"
WEIGHT_FILE = "fp32"
STEP_FILE = "step"
PARAM = "param"
STATE_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
CLIENT_KEY = "ctxlm_ds"
"""Key of the client state with what a resume by this project needs in addition to tensors."""
MAX_GROUPS = 64
"""More parameter groups than an engine has; DeepSpeed reads only as many as the engine has."""
BYTES_PER_FILE = 2048
"""Size of a .pt file without its tensor."""
SPACE_SLACK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Exported:
    """What was written."""

    source: Path
    output: Path
    step: int
    num_parameters: int

    def describe(self) -> list[str]:
        """Return lines for a person."""
        return [
            f"{self.source}, step {self.step}: {self.num_parameters:,} parameters with their optimizer states",
            f"wrote {self.output}",
            f'next: engine.load_checkpoint("{self.output}") with "checkpoint": {{"load_universal": true}} in its JSON',
        ]


def to_universal(checkpoint: Path, output: Path, step_form: str = "auto") -> Exported:
    """Write a checkpoint in DeepSpeed's universal format; one parameter is in memory at a time.

    Args:
        checkpoint: a run (its newest intact checkpoint) or one checkpoint, of any layout.
        output: folder to make; `engine.load_checkpoint(output)` reads it.
        step_form: `tensor` as torch.optim counts steps, `int` as DeepSpeed's and apex's optimizers do; `auto` takes
            that of the optimizer which wrote the checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or without optimizer states, the disk is too full, or
            `output` exists.
    """
    check_new(output, checkpoint)
    source, manifest = find_verified(checkpoint)
    reader = CheckpointReader(source)
    if not reader.moment_kinds():
        raise CheckpointError(
            f"{source} holds weights alone, and DeepSpeed loads the format only with optimizer states; train a step "
            "first, or give another checkpoint"
        )
    config = load_saved_config(source / "config.yaml")
    whole = describe_model(config.model, OBJECTIVES.get(config.objective.name).outputs)
    elements = sum(reader.num_elements(name) * len(reader.kinds(name)) for name in reader.names())
    files = sum(1 + len(reader.kinds(name)) for name in reader.names())
    require_space(output, elements * FP32_BYTES + files * BYTES_PER_FILE)
    saved = read_saved_state(source)
    updates = int(reader.scalars().get("optimizer_updates", manifest.step))
    as_int = _counts_in_int(saved) if step_form == "auto" else step_form == "int"
    step = updates if as_int else torch.tensor(float(updates))
    tag = f"global_step{manifest.step}"
    logger.info("writing %s in DeepSpeed's universal format", source)
    with output_folder(output) as folder:
        _write_parameters(reader, whole, folder / tag / "zero", step, elements)
        torch.save(_optimizer_state(updates), folder / tag / "zero" / "optimizer_state.pt")
        for name in STATE_FILES:
            torch.save(_model_state(manifest.step, updates, saved, reader), folder / tag / name)
        (folder / LATEST_NAME).write_text(tag, encoding="utf-8")
    reader.close()
    return Exported(source, output, manifest.step, sum(reader.num_elements(name) for name in reader.names()))


def _write_parameters(reader: CheckpointReader, whole: WholeModel, zero: Path, step: object, elements: int) -> None:
    done = 0
    with byte_progress("to-universal", elements * FP32_BYTES) as progress:
        for name in reader.names():
            folder = zero / name
            folder.mkdir(parents=True)
            marks = cut_marks(whole.facts[name].split, len(whole.shapes[name]))
            torch.save(step, folder / f"{STEP_FILE}.pt")
            for kind in reader.kinds(name):
                value = reader.read_full(name, kind)
                file = WEIGHT_FILE if kind == WEIGHT_KIND else kind
                torch.save({PARAM: value, **marks}, folder / f"{file}.pt")
                done += value.numel() * FP32_BYTES
                progress.update(done, name)


def cut_marks(split: Split | None, num_dims: int) -> dict[str, Any]:
    """Return how DeepSpeed cuts a parameter of `num_dims` dimensions for tensor-parallel ranks.

    Raises:
        CheckpointError: the parameter's blocks are not equal, which the format cannot express.
    """
    if split is None or split.axis == "rows" and not split.blocks:
        return {"cat_dim": 0}
    if split.axis == "columns":
        return {"cat_dim": 1}
    if split.axis == "vocabulary":
        return {"cat_dim": 0, "vocab_tensor": True} if num_dims > 1 else {"cat_dim": 0}
    if len(set(split.blocks)) > 1:
        raise CheckpointError(f"DeepSpeed's universal format has no parameter made of unequal blocks {split.blocks}")
    return {"cat_dim": 0, "param_n_sub_params": len(split.blocks)}


def _optimizer_state(updates: int) -> dict[str, Any]:
    """Return groups without settings, so that the engine keeps its weight decay, betas and learning rate."""
    groups: list[dict[str, Any]] = [{"params": []} for _ in range(MAX_GROUPS)]
    return {
        "param_groups": groups,
        "ds_version": version("deepspeed"),
        "optimizer_state_dict": {"state": {0: {"step": updates}}, "param_groups": [{"params": []}]},
    }


def _model_state(step: int, updates: int, saved: Mapping[str, Any], reader: CheckpointReader) -> dict[str, Any]:
    train_state = saved.get("train_state", {})
    return {
        "module": {},
        "optimizer": None,
        "lr_scheduler": None,
        "global_steps": step,
        "global_samples": int(train_state.get("rows_consumed", 0)),
        "skipped_steps": step - updates,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": version("deepspeed"),
        CLIENT_KEY: {**saved, "scalars": reader.scalars()},
    }


def _counts_in_int(saved: Mapping[str, Any]) -> bool:
    chosen = str(saved.get("environment", {}).get("optimizer", ""))
    return "=deepspeed" in chosen or "=apex" in chosen


def check_new(output: Path, source: Path) -> None:
    """Raise CheckpointError if `output` exists, or if it and the source contain each other."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise CheckpointError(f"{output} exists and is never overwritten; give another --output")
    target, origin = output.resolve(), source.resolve()
    if target.is_relative_to(origin) or origin.is_relative_to(target):
        raise CheckpointError(f"{output} and the source {source} contain each other; give another --output")


def require_space(output: Path, needed_bytes: int) -> None:
    """Raise CheckpointError if the disk of `output` has less free space than will be written."""
    folder = output.resolve()
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes + SPACE_SLACK_BYTES:
        raise CheckpointError(
            f"{output} needs {needed_bytes / 1e9:.2f} GB and {folder} has {free_bytes / 1e9:.2f} GB left; free space "
            "there or give another --output"
        )
