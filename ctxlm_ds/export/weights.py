"""Where weights come from, under our names: a checkpoint, or a Hugging Face folder through its table.

A checkpoint is found, checked against its manifest, and opened with its recipe and reader. Needs no launcher and no
deepspeed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, find_verified
from ctxlm_ds.checkpoint.layout_free import INDEX_NAME, CheckpointReader
from ctxlm_ds.checkpoint.manifest import MANIFEST_NAME, verify
from ctxlm_ds.console import logger
from ctxlm_ds.errors import CheckpointError, ExportError
from ctxlm_ds.export.hf_config import from_hf_config, read_hf_config
from ctxlm_ds.export.key_maps import Row, Shape, assign
from ctxlm_ds.export.safetensors_files import SafetensorsFolder
from ctxlm_ds.models.build import vocabulary_table
from ctxlm_ds.recipe.load import load_saved_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.registry import OBJECTIVES
from ctxlm_ds.training.metrics import METRICS_NAME


class WeightSource(Protocol):
    """Full parameters under our names, read one at a time."""

    def names(self) -> Sequence[str]: ...

    def shape(self, name: str) -> Shape: ...

    def read_full(self, name: str) -> torch.Tensor: ...


class HuggingFaceWeights:
    """A local folder of a class that some family's export knows, under our names."""

    def __init__(self, folder: Path) -> None:
        """Raise ExportError if the folder is none of them, or holds no safetensors."""
        self.export, self.model, self.pad_id = from_hf_config(folder)
        self._files = SafetensorsFolder(folder)
        file_names = self._files.names()
        self.outputs = self.export.outputs_in(file_names)
        self.key_map = self.export.key_map(self.model, self.outputs, self.pad_id)
        self._assignment = assign(self.key_map, file_names, str(folder))
        self._rows: dict[str, Row] = {row.ours: row for row in self.key_map.rows}
        self._check_doubles(folder)
        self._report(folder)

    def names(self) -> list[str]:
        """List our parameters."""
        return list(self._rows)

    def shape(self, name: str) -> Shape:
        """Return the shape of one of our parameters."""
        return self._rows[name].our_shape(lambda theirs: self._files.shape(self._assignment.stored[theirs]))

    def read_full(self, name: str) -> torch.Tensor:
        """Read one of our parameters in fp32, put together from theirs."""
        return self._rows[name].to_ours(self._read)

    def _read(self, name: str) -> torch.Tensor:
        return self._files.read(self._assignment.stored[name])

    def _check_doubles(self, folder: Path) -> None:
        for alias, name in self._assignment.doubles.items():
            if not torch.equal(self._files.read(alias), self._files.read(name)):
                raise ExportError(
                    f"{folder}: {alias} and {name} differ, but are one tensor in {self.key_map.hf_class}; "
                    "a model with an untied output embedding cannot be imported"
                )

    def _report(self, folder: Path) -> None:
        declared = read_hf_config(folder).get("architectures")
        logger.info("%s read as %s (config.json says %s)", folder, self.key_map.hf_class, declared)
        if self._assignment.unused:
            logger.info("not part of %s: %s", self.key_map.hf_class, ", ".join(self._assignment.unused))
        for warning in self.export.import_warnings(self._read):
            logger.warning("%s: %s", folder, warning)


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
