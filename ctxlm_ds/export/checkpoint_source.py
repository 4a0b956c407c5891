"""A checkpoint opened for export: found, checked against its manifest, its recipe and reader at hand.

In: a run's folder or one checkpoint's. Out: `CheckpointSource`. Needs no launcher and no deepspeed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, list_checkpoints, read_latest
from ctxlm_ds.checkpoint.layout_free import INDEX_NAME, CheckpointReader
from ctxlm_ds.checkpoint.manifest import MANIFEST_NAME, hash_files, verify
from ctxlm_ds.console import logger
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.export.weights import terms_of
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.recipe.load import load_saved_config
from ctxlm_ds.recipe.schema import RunConfig

MOMENTS_PATTERN = "moments-*"
WORD_EMBEDDINGS = "word_embeddings.weight"


@dataclass(frozen=True)
class CheckpointSource:
    """A verified checkpoint: weights by name and what the run recorded beside them."""

    folder: Path
    config: RunConfig
    model: TransformerSection
    """The shape, vocab_size set."""
    terms: tuple[str, ...]
    train_state: dict[str, Any]
    """step, tokens, seconds; empty for imported weights."""
    reader: CheckpointReader

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def metrics_file(self) -> Path:
        """The run's metrics.jsonl, whether or not it is there."""
        return self.folder.parent.parent / "metrics.jsonl"


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a run or a checkpoint of this project (and not a Hugging Face folder)."""
    return (path / INDEX_NAME).is_file() or (path / MANIFEST_NAME).is_file() or (path / CHECKPOINTS_DIR).is_dir()


def open_checkpoint(path: Path) -> CheckpointSource:
    """Open a checkpoint's folder, or the newest checkpoint of a run that verifies.

    Raises:
        CheckpointError: there is none, or it is damaged (a run: every one of them is).
    """
    if not (path / CHECKPOINTS_DIR).is_dir():
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such folder; give a run or a checkpoint (RUN/checkpoints/step-…)")
        return _open_step(path)
    candidates = _newest_first(path / CHECKPOINTS_DIR)
    if not candidates:
        raise CheckpointError(f"{path / CHECKPOINTS_DIR} holds no checkpoint yet; wait for the run's first one")
    problems = []
    for folder in candidates:
        try:
            return _open_step(folder)
        except CheckpointError as error:
            problems.append(str(error))
            logger.warning("%s; trying the checkpoint before it", error)
    raise CheckpointError(f"no checkpoint of {path} verifies: " + "; ".join(problems))


def _newest_first(checkpoints: Path) -> list[Path]:
    """The one that `latest` names, then the others from the highest step down."""
    folders = list(list_checkpoints(checkpoints).values())[::-1]
    latest = read_latest(checkpoints)
    return sorted(folders, key=lambda folder: folder.name != latest)


def _open_step(folder: Path) -> CheckpointSource:
    verify_weights(folder)
    config = load_saved_config(folder / "config.yaml")
    reader = CheckpointReader(folder)
    model = config.model.model_copy(update={"vocab_size": reader.shape(WORD_EMBEDDINGS)[0]})
    return CheckpointSource(folder, config, model, terms_of(config.objective), _train_state(folder), reader)


def verify_weights(folder: Path) -> None:
    """Sizes of all files, checksums of all but the optimizer's moments, which nothing here reads.

    Raises CheckpointError naming every file that is missing or differs.
    """
    manifest = verify(folder, quick=True)
    needed = [name for name in manifest.files if not Path(name).match(MOMENTS_PATTERN)]
    found = hash_files(folder, needed)
    damaged = [name for name in needed if found[name] != manifest.files[name]]
    if damaged:
        names = ", ".join(damaged)
        raise CheckpointError(f"{folder} is damaged: the checksum differs of {names}; use another checkpoint")


def _train_state(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")).get("train_state", {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use another checkpoint") from error


def check_parameters(found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], where: Path) -> None:
    """Raise CheckpointError listing every parameter that is missing, unknown or of another shape."""
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unknown" for name in found if name not in expected]
    problems += _shape_problems(found, expected)
    if problems:
        raise CheckpointError(f"{where} does not hold the model that its config.yaml describes: {'; '.join(problems)}")


def _shape_problems(found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> Sequence[str]:
    return [
        f"{name} has shape {found[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
