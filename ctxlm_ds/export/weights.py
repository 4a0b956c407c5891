"""Sources of weights under our names: a checkpoint, or a Hugging Face folder through its key map.

A checkpoint is found, compared with its manifest, and opened with its recipe and reader. Needs no launcher and no
deepspeed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from ctxlm_ds.atomic import read_object
from ctxlm_ds.checkpoint.chunk_index import INDEX_NAME
from ctxlm_ds.checkpoint.folders import AVERAGE_NAME, CHECKPOINTS_DIR, find_verified
from ctxlm_ds.checkpoint.manifest import MANIFEST_NAME, verify
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.checkpoint.saved_state import read_saved_state
from ctxlm_ds.console import logger
from ctxlm_ds.errors import CheckpointError, ConfigError, ExportError
from ctxlm_ds.export.base import FamilyExport
from ctxlm_ds.export.hf_config import MAX_SIZE, from_hf_config, model_files, read_hf_config
from ctxlm_ds.export.key_maps import Shape, WeightSource, assign
from ctxlm_ds.export.safetensors_files import HEADS_FILE, SafetensorsFiles
from ctxlm_ds.models.program import Program, plain_program
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.load import load_saved_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.untrusted_json import check_regular_files

IMPORT_RECORD = "imported_from.json"
KEPT_SETTINGS = "kept_settings"
FRESH_SEED = 0
MOMENTS_PATTERN = "moments-*"
"""Files of the optimizer's moments, of which an export checks only the sizes."""


def check_source(source: WeightSource, program: Callable[[], Program], folder: Path) -> Program:
    """Return the program that the source's config describes, with the names and shapes of the source.

    Raises CheckpointError, which lists every parameter that is missing, unknown or of another shape.
    """
    found = {name: source.shape(name) for name in source.names()}
    try:
        expected = (described := program()).shapes
    except (ConfigError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: the weights do not fit its config: {error}") from error
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unknown" for name in found if name not in expected]
    problems += [
        f"{name} has shape {found[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        raise CheckpointError(f"{folder} does not hold the model that its config describes: {'; '.join(problems)}")
    return described


def check_finite(name: str, value: torch.Tensor, where: object) -> torch.Tensor:
    """Return the value of a parameter; raise CheckpointError if it has a NaN or an infinity."""
    if not bool(torch.isfinite(value).all()):
        raise CheckpointError(f"{where}: {name} has NaN or infinite values; give weights from before a run diverged")
    return value


class ClassFolder:
    """The files of one class of transformers, under our names."""

    def __init__(self, export: FamilyExport, folder: Path) -> None:
        """Open the files; `folder` is that of the model."""
        self.export, self.folder = export, folder / export.folder
        check_regular_files(self.folder, ExportError)
        self.files = SafetensorsFiles(model_files(self.folder))
        self.file_names = list(self.files.shapes)

    def assign(self, model: ModelSection, outputs: Sequence[str], pad_id: int, new_head: bool) -> None:
        """Find the tensors of the class among those of the files; raise ExportError if they are not the same."""
        self.key_map = self.export.key_map(model, self.export.shared_outputs(outputs), pad_id)
        self._assignment = assign(self.key_map, self.file_names, str(self.folder), new_head)
        stored = self._assignment.stored.keys()
        self.rows = {row.ours: row for row in self.key_map.rows if stored >= set(row.theirs)}

    def shape(self, name: str) -> Shape:
        return self.rows[name].our_shape(lambda theirs: self.files.shapes[self._assignment.stored[theirs]])

    def read(self, name: str) -> torch.Tensor:
        """Return one of our parameters in fp32, made of theirs."""
        return self.rows[name].to_ours(self.read_theirs)

    def read_theirs(self, name: str) -> torch.Tensor:
        """Return one of their tensors by its name in the table."""
        return self.files.read(self._assignment.stored[name])

    def check(self) -> None:
        """Raise ExportError if both names of a tied tensor differ, or a tensor that our model lacks is not 0."""
        for alias, name in self._assignment.doubles.items():
            if not torch.equal(self.files.read(alias), self.files.read(name)):
                raise ExportError(
                    f"{self.folder}: {alias} and {name} differ, but are one tensor in {self.key_map.hf_class}; "
                    "a model with an untied output embedding cannot be imported"
                )

        for name in self._assignment.zero:
            if bool(self.files.read(name).any()):
                raise ExportError(f"{self.folder}: {name} is not 0; only models without such a tensor can be imported")

    def log(self) -> None:
        """Log what is read, what is not, and what an import changes."""
        declared = read_hf_config(self.folder).get("architectures")
        logger.info("%s read as %s (config.json says %s)", self.folder, self.key_map.hf_class, declared)
        if self._assignment.unused:
            logger.info("not part of %s: %s", self.key_map.hf_class, ", ".join(self._assignment.unused))
        for warning in self.export.import_warnings(self.read_theirs):
            logger.warning("%s: %s", self.folder, warning)


class HuggingFaceWeights:
    """A local folder of the classes that some family's export knows, under our names."""

    def __init__(self, folder: Path, with_heads: bool = False, new_head: bool = False) -> None:
        """Open the files; `with_heads` adds heads that its class lacks, `new_head` fresh ones of its class.

        Raises ExportError if the folder is of none of these classes, or its files do not fit its config.
        """
        check_regular_files(folder, ExportError)
        self.folder = folder
        self._heads = SafetensorsFiles([])
        self.export, self.model, self.pad_id, self.kept = from_hf_config(folder)
        self._parts = [ClassFolder(part, folder) for part in self.export.models()]
        found = [part.export.outputs_in(part.file_names) for part in self._parts]
        self.outputs = tuple(dict.fromkeys(name for names in found for name in names))
        try:
            _check_layers(self.model, sum(len(part.file_names) for part in self._parts), folder)
            for part in self._parts:
                part.assign(self.model, self.outputs, self.pad_id, new_head)
            self.key_map = self._parts[0].key_map
            # A parameter that several classes have is read from the first of them.
            self._part_of = {name: part for part in reversed(self._parts) for name in part.rows}
            self.fresh = {row.ours for part in self._parts for row in part.key_map.rows} - self._part_of.keys()
            """Heads that the folder lacks; they have their initial values."""
            if with_heads and (folder / HEADS_FILE).is_file():
                self._heads = SafetensorsFiles([folder / HEADS_FILE])
                self.outputs = (*self.outputs, *sorted(self.export.extra_outputs))
            check_source(self, lambda: self.program, folder)
        except CheckpointError as error:
            raise ExportError(str(error)) from error
        for part in self._parts:
            part.check()
            self._check_shared(part)
            part.log()

    @cached_property
    def program(self) -> Program:
        return plain_program(self.model, self.outputs)

    def names(self) -> list[str]:
        return [*self._part_of, *self._heads.shapes, *sorted(self.fresh)]

    def shape(self, name: str) -> Shape:
        if name in self.fresh:
            return self.program.shapes[name]
        return self._heads.shapes[name] if name in self._heads.shapes else self._part_of[name].shape(name)

    def read_full(self, name: str) -> torch.Tensor:
        """Return one of our parameters in fp32, made of theirs."""
        if name in self.fresh:
            return self.program.initial_value(name, FRESH_SEED)
        return self._heads.read(name) if name in self._heads.shapes else self._part_of[name].read(name)

    def read_finite(self, name: str) -> torch.Tensor:
        """Return one of our parameters in fp32; raise CheckpointError if it has a NaN or an infinity."""
        return check_finite(name, self.read_full(name), self.folder)

    def _check_shared(self, part: ClassFolder) -> None:
        """Raise ExportError if a class has other values of a parameter than the one from which it is read."""
        for name in part.rows:
            first = self._part_of[name]
            if first is not part and not torch.equal(first.read(name), part.read(name)):
                raise ExportError(
                    f"{first.folder} and {part.folder} have different {', '.join(part.rows[name].theirs)}, which the "
                    "two models share here; give folders that were trained together"
                )


@dataclass(frozen=True)
class CheckpointSource:
    """A verified checkpoint: weights by name, and what the run recorded."""

    folder: Path
    config: RunConfig
    model: ModelSection
    """The shape, with vocab_size set."""
    outputs: tuple[str, ...]
    """What its objective needs from the model."""
    train_state: dict[str, Any]
    """step, tokens, seconds; empty for imported weights."""
    reader: CheckpointReader
    program: Program
    """What its config describes; check_source compares it with the weights."""

    @property
    def kept_settings(self) -> dict[str, Any]:
        """Settings of the Hugging Face folder that the weights were imported from (FamilyExport.kept_settings)."""
        kept = (read_object(self.folder / IMPORT_RECORD) or {}).get(KEPT_SETTINGS)
        return kept if isinstance(kept, dict) else {}

    @property
    def trained_length(self) -> int | None:
        """Longest sequence that the weights were trained on; None if it is unknown or has no limit."""
        longest = self.model.longest_sequence
        if longest is None or not self.train_state or self.config.initialize_from:
            return longest
        return min(longest, self.config.data.seq_length)


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a run or a checkpoint of this project (and not a Hugging Face folder)."""
    return (path / INDEX_NAME).is_file() or (path / MANIFEST_NAME).is_file() or (path / CHECKPOINTS_DIR).is_dir()


def open_checkpoint(path: Path, with_moments: bool = False, averaged: bool = False) -> CheckpointSource:
    """Open a checkpoint's folder, or the newest checkpoint of a run that verifies, `with_moments` these too.

    `averaged`: with moving averages as weights. Raises CheckpointError if there is none, or it is damaged (of a run:
    all of them are).
    """
    sizes_only = None if with_moments or averaged else MOMENTS_PATTERN
    folder, _ = find_verified(path, partial(verify, sizes_only=sizes_only))
    reader = CheckpointReader(folder)
    if averaged:
        reader.take_averages()
    config = load_saved_config(folder / "config.yaml")
    outputs = build_objective(config.objective).outputs
    _check_layers(config.model, len(reader.names()), folder)
    program = plain_program(config.model.model_copy(update={"vocab_size": config.model.vocab_size or 1}), outputs)
    table = program.vocabulary_table
    if table not in reader or not reader.shape(table) or reader.shape(table)[0] > MAX_SIZE:
        raise CheckpointError(f"{folder} has no {table}, so it is not a model of the family {config.model.family}")
    model = config.model.model_copy(update={"vocab_size": reader.shape(table)[0]})
    if model.vocab_size != config.model.vocab_size:
        program = plain_program(model, outputs)
    progress = read_saved_state(folder) or read_object(folder / AVERAGE_NAME) or {}
    train_state = progress.get("train_state") or {}
    return CheckpointSource(folder, config, model, outputs, train_state, reader, program)


def _check_layers(model: ModelSection, num_tensors: int, folder: Path) -> None:
    """Raise CheckpointError before a model with more layers than there are tensors is built."""
    if model.num_distinct_blocks > num_tensors:
        raise CheckpointError(
            f"{folder}: its config describes {model.num_distinct_blocks} layers, but it has only {num_tensors} tensors"
        )
