"""Import of a checkpoint in DeepSpeed's universal format as a run of this project.

In: what DeepSpeed's ds_to_universal.py wrote (of ZeRO 1, 2 or 3) or universal.py did, and the recipe of its model; the
parameters must have this project's names. Out: a run folder with weights and moments. A run of this project resumes; of
any other run the place in the data is unknown, so it serves initialize_from and exports. The files are pickles; they
are read as tensors and plain values only, and a file that holds more is refused unread.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ctxlm_ds.atomic import fsync_tree, output_folder
from ctxlm_ds.checkpoint import folders
from ctxlm_ds.checkpoint.chunk_index import WEIGHT_KIND, merge_index
from ctxlm_ds.checkpoint.chunk_writer import ChunkWriter
from ctxlm_ds.checkpoint.manifest import MAX_STEP, hash_files, list_files, write_manifest
from ctxlm_ds.checkpoint.saved_state import STATE_NAME
from ctxlm_ds.checkpoint.tensor_file import FP32_BYTES, LazyTensor
from ctxlm_ds.checkpoint.universal import (
    CLIENT_KEY,
    LATEST_NAME,
    PARAM,
    STEP_FILE,
    WEIGHT_FILE,
    check_new,
    require_space,
)
from ctxlm_ds.console import byte_progress, logger
from ctxlm_ds.errors import CheckpointError, ConfigError
from ctxlm_ds.models.build import describe_model, vocabulary_table
from ctxlm_ds.recipe.load import dump_config, load_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import OBJECTIVES
from ctxlm_ds.tokenizers.load import load_tokenizer

CLIENT_PARTS = ("train_state", "data", "environment", "scalars")
STATE_PATTERN = "*mp_rank_00_model_states.pt"


@dataclass(frozen=True)
class Imported:
    """Result of an import."""

    source: Path
    output: Path
    step: int
    num_parameters: int
    moments: tuple[str, ...]
    resumes: bool
    """True if the place in the data is known."""

    def describe(self) -> list[str]:
        """Return lines for a person."""
        moments = ", ".join(self.moments) or "no moments"
        following = "run_dir" if self.resumes else "initialize_from"
        reason = "" if self.resumes else " (its place in the data is unknown, so it is not resumed)"
        return [
            f"{self.source}, step {self.step}: {self.num_parameters:,} parameters with {moments}",
            f"wrote {self.output}",
            f"next: --set {following}={self.output}{reason}",
        ]


@dataclass(frozen=True)
class _Progress:
    """Counters of the run that wrote the checkpoint."""

    step: int
    updates: int
    rows: int
    saved: Mapping[str, Any]
    """state.json of a run of this project; empty for others."""


def from_universal(checkpoint: Path, output: Path, recipe: str | Path) -> Imported:
    """Write a universal checkpoint as the only one of a new run folder; one parameter is in memory at a time.

    Args:
        checkpoint: folder with `latest_universal`, or one step's folder (with `zero` in it).
        output: folder to make; it appears when it is complete.
        recipe: recipe of the model, with the tokenizer's path.

    Raises:
        CheckpointError: the folder is damaged or of another model, the disk is too full, or `output` exists.
        ConfigError: the recipe is wrong or names no tokenizer.
    """
    check_new(output, checkpoint)
    source = _find_step(checkpoint)
    config = load_config(recipe)
    if config.tokenizer.path is None:
        raise ConfigError("tokenizer.path is not set; a checkpoint holds its tokenizer, so name its folder")
    tokenizer = load_tokenizer(config.tokenizer.path)
    shapes = _shapes(config, source)
    kinds = _kinds(source, shapes)
    elements = sum(math.prod(shape) for shape in shapes.values())
    require_space(output, elements * len(kinds) * FP32_BYTES)
    progress = _read_progress(source, next(iter(shapes)))
    logger.info("importing %s at step %d", source, progress.step)
    with _new_run(output, progress.step) as folder:
        _write_chunks(folder, source, shapes, kinds, progress)
        tokenizer.save(folder / "tokenizer")
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        (folder / STATE_NAME).write_text(json.dumps(_state(progress), indent=1), encoding="utf-8")
    moments = tuple(kind for kind in kinds if kind != WEIGHT_KIND)
    return Imported(source, output, progress.step, elements, moments, bool(progress.saved))


@contextmanager
def _new_run(output: Path, step: int) -> Iterator[Path]:
    """Yield the folder of a run's only checkpoint; the run appears when it is complete, with manifest and `latest`."""
    with output_folder(output) as run:
        folder = run / folders.CHECKPOINTS_DIR / folders.step_name(step)
        folder.mkdir(parents=True)
        yield folder
        # The files must be on the disk before the manifest that lists them.
        fsync_tree(folder)
        write_manifest(folder, step, hash_files(folder, list_files(folder)))
        (run / folders.CHECKPOINTS_DIR / folders.LATEST_NAME).write_text(folder.name + "\n", encoding="utf-8")
    logger.info("wrote %s", output / folders.CHECKPOINTS_DIR / folder.name)


def _find_step(checkpoint: Path) -> Path:
    latest = checkpoint / LATEST_NAME
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


def _shapes(config: RunConfig, source: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the recipe's model, which must be those of the folder."""
    outputs = OBJECTIVES.get(config.objective.name).outputs
    table = vocabulary_table(config.model, outputs)
    width = describe_model(config.model.model_copy(update={"vocab_size": 1}), outputs).shapes[table][1]
    rows = _load_tensor(source / "zero" / table / f"{WEIGHT_FILE}.pt").numel() // width
    if config.model.vocab_size not in (None, rows):
        raise CheckpointError(
            f"{source}: {rows} rows of {table}, the recipe's model has {config.model.vocab_size}; give the recipe of "
            "this checkpoint"
        )
    shapes = describe_model(config.model.model_copy(update={"vocab_size": rows}), outputs).shapes
    found = {path.name for path in (source / "zero").iterdir() if path.is_dir()}
    problems = [f"{name} is missing" for name in shapes if name not in found]
    problems += [f"{name} is unknown" for name in sorted(found - shapes.keys())]
    if problems:
        raise CheckpointError(f"{source} does not hold the recipe's model: {'; '.join(problems)}")
    return shapes


def _kinds(source: Path, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the kinds of tensors: the weight and the moments, which a parameter without gradients may lack."""
    files = {path.stem for name in shapes for path in (source / "zero" / name).glob("*.pt")}
    return [WEIGHT_KIND, *sorted(files - {WEIGHT_FILE, STEP_FILE})]


def _write_chunks(
    folder: Path, source: Path, shapes: Mapping[str, tuple[int, ...]], kinds: list[str], progress: _Progress
) -> None:
    writer = ChunkWriter(folder, 0)
    elements = sum(math.prod(shape) for shape in shapes.values())
    done = 0

    def read(name: str, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        nonlocal done
        done += math.prod(shape) * FP32_BYTES
        bar.update(done, name)
        return _read(source, name, kind, shape)

    for name, shape in shapes.items():
        stored = _step(source, name)
        if stored not in (None, progress.updates):
            raise CheckpointError(f"{source}: {name} has had {stored} updates, others {progress.updates}")
        for kind in kinds:
            writer.add(name, kind, shape, 0, LazyTensor(math.prod(shape), partial(read, name, kind, shape)))
    with byte_progress("from-universal", elements * len(kinds) * FP32_BYTES) as bar:
        written = writer.write()
    scalars = dict(progress.saved.get("scalars", {}))
    merge_index(folder, [written.value], {**scalars, "optimizer_updates": progress.updates})


def _read(source: Path, name: str, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    path = source / "zero" / name / f"{WEIGHT_FILE if kind == WEIGHT_KIND else kind}.pt"
    if kind != WEIGHT_KIND and not path.is_file():
        return torch.zeros(math.prod(shape))
    value = _load_tensor(path)
    # Tensors of ZeRO-3 are flat.
    if tuple(value.shape) not in (shape, (math.prod(shape),)):
        raise CheckpointError(f"{path}: shape {tuple(value.shape)}, the recipe's model has {shape}")
    return value.reshape(-1).float()


def _read_progress(source: Path, name: str) -> _Progress:
    paths = sorted(source.glob(STATE_PATTERN))
    if not paths:
        raise CheckpointError(f"{source}: no {STATE_PATTERN}, which says how far the run was")
    state = _load(paths[0])
    if not isinstance(state, dict):
        raise CheckpointError(f"{paths[0]} holds no state of a run")
    counters = [state.get(key, 0) for key in ("global_steps", "skipped_steps", "global_samples")]
    if not all(type(counter) is int and 0 <= counter < MAX_STEP for counter in counters):
        raise CheckpointError(f"{paths[0]}: global_steps, skipped_steps, global_samples are {counters}")
    step, skipped, rows = counters
    saved = state.get(CLIENT_KEY)
    stored = _step(source, name)
    return _Progress(step, step - skipped if stored is None else stored, rows, _plain(saved, paths[0]))


def _plain(saved: Any, path: Path) -> dict[str, Any]:
    """Return the client state of a run of this project, which is JSON."""
    if saved is None:
        return {}
    try:
        plain = json.loads(json.dumps(saved))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {CLIENT_KEY} is not plain data ({error})") from None
    if not isinstance(plain, dict) or not all(isinstance(plain.get(key, {}), dict) for key in CLIENT_PARTS):
        raise CheckpointError(f"{path}: {CLIENT_KEY} is not the state of a run")
    return plain


def _state(progress: _Progress) -> dict[str, Any]:
    """Return state.json; for another program's run the data is unknown, and a resume reports that."""
    if progress.saved:
        return {key: progress.saved.get(key, {}) for key in ("train_state", "data", "environment")}
    train_state = {
        "step": progress.step,
        "rows_consumed": progress.rows,
        "tokens": 0,
        "skipped_steps": progress.step - progress.updates,
        "seconds": 0.0,
    }
    return {"train_state": train_state, "data": {}, "environment": {}}


def _step(source: Path, name: str) -> int | None:
    path = source / "zero" / name / f"{STEP_FILE}.pt"
    if not path.is_file():
        return None
    value = _load(path)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0 or value != int(value):
        raise CheckpointError(f"{path}: {value!r} is not a number of updates")
    return int(value)


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
