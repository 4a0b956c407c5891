"""A checkpoint opened for export: found, checked against its manifest, its recipe and reader at hand.

In: a run's folder or one checkpoint's. Out: `CheckpointSource`. Needs no launcher and no deepspeed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, find_verified
from ctxlm_ds.checkpoint.layout_free import INDEX_NAME, CheckpointReader
from ctxlm_ds.checkpoint.manifest import MANIFEST_NAME, verify
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.models.build import vocabulary_table
from ctxlm_ds.recipe.load import load_saved_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.registry import OBJECTIVES
from ctxlm_ds.training.metrics import METRICS_NAME

MOMENTS_PATTERN = "moments-*"
"""Files of the optimizer's moments, which no export reads: only their sizes are checked."""


@dataclass(frozen=True)
class CheckpointSource:
    """A verified checkpoint: weights by name and what the run recorded beside them."""

    folder: Path
    config: RunConfig
    model: ModelSection
    """The shape, vocab_size set."""
    outputs: tuple[str, ...]
    """What its objective needs from the model."""
    train_state: dict[str, Any]
    """step, tokens, seconds; empty for imported weights."""
    reader: CheckpointReader

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def metrics_file(self) -> Path:
        """The run's metrics.jsonl, whether or not it is there."""
        return self.folder.parent.parent / METRICS_NAME


def is_checkpoint(path: Path) -> bool:
    """Tell whether `path` is a run or a checkpoint of this project (and not a Hugging Face folder)."""
    return (path / INDEX_NAME).is_file() or (path / MANIFEST_NAME).is_file() or (path / CHECKPOINTS_DIR).is_dir()


def open_checkpoint(path: Path) -> CheckpointSource:
    """Open a checkpoint's folder, or the newest checkpoint of a run that verifies.

    Raises:
        CheckpointError: there is none, or it is damaged (a run: every one of them is).
    """
    folder, _ = find_verified(path, partial(verify, sizes_only=MOMENTS_PATTERN))
    reader = CheckpointReader(folder)
    config = load_saved_config(folder / "config.yaml")
    outputs = OBJECTIVES.get(config.objective.name).outputs
    table = vocabulary_table(config.model, outputs)
    if table not in reader:
        raise CheckpointError(f"{folder} has no {table}, so it is not a model of the family {config.model.family}")
    model = config.model.model_copy(update={"vocab_size": reader.shape(table)[0]})
    return CheckpointSource(folder, config, model, outputs, _train_state(folder), reader)


def _train_state(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")).get("train_state", {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use another checkpoint") from error
