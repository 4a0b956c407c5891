"""DeepSpeed's universal format: a checkpoint is written in it, and one in it becomes a run. Imports no deepspeed.

The format (deepspeed/checkpoint/ds_to_universal.py and universal_checkpoint.py, 0.19) is a folder per step:

    latest_universal                               the step's folder
    global_stepN/zero/NAME/fp32.pt, exp_avg.pt …   {"param": full tensor}, or under ZeRO-3 the flat tensor itself
    global_stepN/zero/NAME/step.pt                 the optimizer's count (ZeRO 1 and 2)
    global_stepN/zero/optimizer_state.pt           settings of the parameter groups
    global_stepN/mp_rank_00_model_states.pt        counters and client state (zero_pp_rank_0_… under ZeRO-3)

The files are pickles: they are read as tensors and plain values only. docs/checkpoints.md says which engines load it.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ctxlm_ds.atomic import output_folder
from ctxlm_ds.checkpoint.chunk_index import WEIGHT_KIND, ChunkWriter, LazyTensor, merge_index
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, LATEST_NAME, check_output, find_verified, step_name
from ctxlm_ds.checkpoint.manifest import MAX_STEP, seal
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.checkpoint.saved_state import STATE_NAME, read_saved_state
from ctxlm_ds.console import logger
from ctxlm_ds.errors import CheckpointError, ConfigError
from ctxlm_ds.models.program import plain_program
from ctxlm_ds.parallel.placement import Split
from ctxlm_ds.recipe.load import dump_config, load_config, load_saved_config
from ctxlm_ds.recipe.sections import EMA_KIND, ModelSection
from ctxlm_ds.registry import OBJECTIVES
from ctxlm_ds.tokenizers.load import load_tokenizer

UNIVERSAL_LATEST_NAME = "latest_universal"
WEIGHT_FILE = "fp32"
STEP_FILE = "step"
PARAM = "param"
STATE_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
COUNTERS = ("global_steps", "skipped_steps", "global_samples")
CLIENT_KEY = "ctxlm_ds"
"""Key of the client state with what a resume by this project needs in addition to tensors."""
MAX_GROUPS = 64
"""More parameter groups than an engine has; DeepSpeed reads only as many as the engine has."""

Shapes = Mapping[str, tuple[int, ...]]


def to_universal(checkpoint: Path, output: Path, step_form: str = "auto") -> None:
    """Write a checkpoint in DeepSpeed's universal format; one parameter is in memory at a time.

    The checkpoint may be a run (its newest intact one). `step_form` is `tensor` as torch.optim counts steps, `int` as
    DeepSpeed's and apex's optimizers do, or `auto` for that of the optimizer which wrote the checkpoint. Raises
    CheckpointError if the checkpoint is missing, damaged or without optimizer states, the disk is full, or `output`
    exists.
    """
    check_output(output, checkpoint)
    source, manifest = find_verified(checkpoint)
    reader = CheckpointReader(source)
    if not set(reader.moment_kinds()) - {EMA_KIND}:
        raise CheckpointError(
            f"{source} holds weights alone, and DeepSpeed loads the format only with optimizer states; train a step "
            "first, or give another checkpoint"
        )
    config = load_saved_config(source / "config.yaml")
    if config.optimizer.matrix_moments is not None or len(config.optimizer.moments) != 2:
        raise CheckpointError(
            f"{source} is of optimizer.name {config.optimizer.name}, which does not keep two moments of each "
            "parameter; DeepSpeed loads the format only with two; convert with to-hf"
        )
    whole = plain_program(config.model, OBJECTIVES.get(config.objective.name).outputs)
    saved = read_saved_state(source)
    updates = int(reader.scalars.get("optimizer_updates", manifest.step))
    chosen = str(saved.get("environment", {}).get("optimizer", ""))
    as_int = step_form == "int" or (step_form == "auto" and ("=deepspeed" in chosen or "=apex" in chosen))
    step = updates if as_int else torch.tensor(float(updates))
    tag = f"global_step{manifest.step}"
    logger.info("writing %s in DeepSpeed's universal format", source)
    with output_folder(output) as folder:
        zero = folder / tag / "zero"
        for name in reader.names():
            (zero / name).mkdir(parents=True)
            marks = cut_marks(whole.facts[name].split, len(whole.shapes[name]))
            _save(step, zero / name / f"{STEP_FILE}.pt")
            for kind in (WEIGHT_KIND, *(kind for kind in reader.moment_kinds() if kind != EMA_KIND)):
                is_kept = kind in reader.kinds(name)  # a run with training.only keeps no moments of the others
                value = reader.read_full(name, kind) if is_kept else torch.zeros(whole.shapes[name])
                _save({PARAM: value, **marks}, _file_of(zero, name, kind))
        # Groups without settings, so that the engine keeps its weight decay, betas and learning rate.
        optimizer = {"state": {0: {"step": updates}}, "param_groups": [{"params": []}]}
        groups: list[dict[str, Any]] = [{"params": []} for _ in range(MAX_GROUPS)]
        state = {"param_groups": groups, "ds_version": version("deepspeed"), "optimizer_state_dict": optimizer}
        _save(state, zero / "optimizer_state.pt")
        for name in STATE_FILES:
            _save(_model_state(manifest.step, updates, saved, reader), folder / tag / name)
        (folder / UNIVERSAL_LATEST_NAME).write_text(tag, encoding="utf-8")


def _save(value: object, path: Path) -> None:
    try:
        torch.save(value, path)
    except RuntimeError as error:  # of a full disk too
        raise CheckpointError(
            f"{path} cannot be written ({error}); free space there or give another --output"
        ) from None


def _file_of(zero: Path, name: str, kind: str) -> Path:
    return zero / name / f"{WEIGHT_FILE if kind == WEIGHT_KIND else kind}.pt"


def cut_marks(split: Split | None, num_dims: int) -> dict[str, Any]:
    """Return how DeepSpeed cuts a parameter of `num_dims` dimensions for tensor-parallel ranks.

    Raises CheckpointError if the parameter's blocks are not equal, which the format cannot express.
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


def _model_state(step: int, updates: int, saved: Mapping[str, Any], reader: CheckpointReader) -> dict[str, Any]:
    return {
        "module": {},
        "optimizer": None,
        "lr_scheduler": None,
        "global_steps": step,
        "global_samples": int(saved.get("train_state", {}).get("rows_consumed", 0)),
        "skipped_steps": step - updates,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": version("deepspeed"),
        CLIENT_KEY: {**saved, "scalars": reader.scalars},
    }


def from_universal(checkpoint: Path, output: Path, recipe: str | Path) -> bool:
    """Write a universal checkpoint as the only one of a new run folder; one parameter is in memory at a time.

    The checkpoint has this project's names of parameters; it is a folder with `latest_universal`, or one step's folder.
    The recipe is that of its model, with the tokenizer's path. Returns whether the run resumes: only for a run of this
    project the place in the data is known. Raises CheckpointError if the folder is damaged or of another model, or
    `output` exists, ConfigError if the recipe is wrong or names no tokenizer.
    """
    check_output(output, checkpoint)
    source = _find_step(checkpoint)
    config = load_config(recipe)
    if config.tokenizer.path is None:
        raise ConfigError("tokenizer.path is not set; a checkpoint holds its tokenizer, so name its folder")
    tokenizer = load_tokenizer(config.tokenizer.path)
    shapes = _shapes(config.model, OBJECTIVES.get(config.objective.name).outputs, source / "zero")
    step, updates, saved = _read_state(source)
    state = {key: saved.get(key, {}) for key in ("train_state", "data", "environment")}
    logger.info("importing %s at step %d", source, step)
    with output_folder(output) as run:
        folder = run / CHECKPOINTS_DIR / step_name(step)
        tokenizer.save(folder / "tokenizer")
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        (folder / STATE_NAME).write_text(json.dumps(state, indent=1), encoding="utf-8")
        read_saved_state(folder)
        writer, updates = _plan_chunks(folder, source / "zero", shapes, updates)
        written = writer.write()
        merge_index(folder, [written.value], {**saved.get("scalars", {}), "optimizer_updates": updates})
        seal(folder, step, written.files)
        (folder.parent / LATEST_NAME).write_text(folder.name + "\n", encoding="utf-8")
    return "scalars" in saved


def _find_step(checkpoint: Path) -> Path:
    latest = checkpoint / UNIVERSAL_LATEST_NAME
    if latest.is_file():
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
        if not tag or Path(tag).name != tag:
            raise CheckpointError(f"{latest} does not name a folder next to it: {tag!r}")
        checkpoint = checkpoint / tag
    if not (checkpoint / "zero").is_dir():
        raise CheckpointError(
            f"{checkpoint}: no folder `zero`, so this is not DeepSpeed's universal format; convert an ordinary "
            "DeepSpeed checkpoint with its ds_to_universal.py first"
        )
    return checkpoint


def _shapes(model: ModelSection, outputs: Sequence[str], zero: Path) -> Shapes:
    """Return the shape of every parameter of the recipe's model, which must be those of the folder."""
    described = plain_program(model.model_copy(update={"vocab_size": model.vocab_size or 1}), outputs)
    table = described.vocabulary_table
    width = described.shapes[table][1]
    rows = _load_tensor(_file_of(zero, table, WEIGHT_KIND)).numel() // width
    if model.vocab_size not in (None, rows):
        raise CheckpointError(
            f"{zero}: {rows} rows of {table}, the recipe's model has {model.vocab_size}; give the recipe of "
            "this checkpoint"
        )
    if model.vocab_size is None:
        described = plain_program(model.model_copy(update={"vocab_size": rows}), outputs)
    shapes = described.shapes
    found = {path.name for path in zero.iterdir() if path.is_dir()}
    problems = [f"{name} is missing" for name in shapes if name not in found]
    problems += [f"{name} is unknown" for name in sorted(found - shapes.keys())]
    if problems:
        raise CheckpointError(f"{zero} does not hold the recipe's model: {'; '.join(problems)}")
    return shapes


def _read_state(source: Path) -> tuple[int, int, dict[str, Any]]:
    """Return steps, updates, and the run's state.json and scalars, or for another program's run its counters alone."""
    path = next((source / name for name in STATE_FILES if (source / name).is_file()), source / STATE_FILES[0])
    state = _load(path)
    counters: list[Any] = [state.get(key, 0) for key in COUNTERS] if isinstance(state, dict) else [None]
    if not all(type(counter) is int and 0 <= counter < MAX_STEP for counter in counters):
        raise CheckpointError(f"{path} holds no state of a run: {', '.join(COUNTERS)} are {counters}")
    step, skipped, rows = counters
    train_state = {"step": step, "rows_consumed": rows, "tokens": 0, "skipped_steps": skipped, "seconds": 0.0}
    saved = state.get(CLIENT_KEY, {"train_state": train_state, "data": {}, "environment": {}})
    try:
        plain = json.loads(json.dumps(saved))
        if not isinstance(plain, dict) or not isinstance(plain.get("scalars", {}), dict):
            raise TypeError("expected an object")
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {CLIENT_KEY} is not the state of a run ({error})") from None
    return step, step - skipped, plain


def _plan_chunks(folder: Path, zero: Path, shapes: Shapes, updates: int) -> tuple[ChunkWriter, int]:
    """Return the writer of all parameters, and how often each was updated."""
    counts = {name: _read_count(zero / name / f"{STEP_FILE}.pt") for name in shapes}
    updates = next((count for count in counts.values() if count is not None), updates)
    for name, count in counts.items():
        if count not in (None, updates):
            raise CheckpointError(f"{zero}: {name} has had {count} updates, others {updates}")
    kinds = {path.stem for name in shapes for path in (zero / name).glob("*.pt")} - {WEIGHT_FILE, STEP_FILE}
    writer = ChunkWriter(folder, 0)
    for name, shape in shapes.items():
        for kind in (WEIGHT_KIND, *sorted(kinds)):
            read = partial(_read_values, _file_of(zero, name, kind), shape, kind != WEIGHT_KIND)
            writer.add(name, kind, shape, 0, LazyTensor(math.prod(shape), read))
    return writer, updates


def _read_values(path: Path, shape: tuple[int, ...], optional: bool) -> torch.Tensor:
    """Return a weight or moment in fp32; moments of a parameter that never had a gradient are zeros."""
    if optional and not path.is_file():
        return torch.zeros(shape)
    value = _load_tensor(path)
    # Tensors of ZeRO-3 are flat.
    if tuple(value.shape) not in (shape, (math.prod(shape),)):
        raise CheckpointError(f"{path}: shape {tuple(value.shape)}, the recipe's model has {shape}")
    return value.float()


def _read_count(path: Path) -> int | None:
    value = _load(path) if path.is_file() else None
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, (int, float)) and math.isfinite(value) and value == int(value) >= 0:
        return None if value is None else int(value)
    raise CheckpointError(f"{path}: {value!r} is not a number of updates")


def _load_tensor(path: Path) -> torch.Tensor:
    value = _load(path)
    if isinstance(value, dict):
        value = value.get(PARAM)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        raise CheckpointError(f"{path}: holds no tensor of numbers")
    return value


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path}: holds more than tensors and plain values, and is not read ({reason})") from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
