"""Where weights come from, under our names: a checkpoint, or a Hugging Face folder through its table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from ctxlm_ds.console import logger
from ctxlm_ds.data.stream.collate import CAUSAL_LM
from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.hf_config import from_hf_config, read_hf_config
from ctxlm_ds.export.key_maps import (
    BERT_NEXT_SENTENCE_ROWS,
    Row,
    Shape,
    assign,
    build_key_map,
    convert,
    expand,
    our_shape,
)
from ctxlm_ds.export.safetensors_files import SafetensorsFolder
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.kernels.dispatch import choose_kernels
from ctxlm_ds.models.build import build_layer_list
from ctxlm_ds.models.layer_list import LayerSequence
from ctxlm_ds.objectives.build import objective_terms
from ctxlm_ds.recipe.schema import KernelsConfig
from ctxlm_ds.recipe.sections import ObjectiveSection


class WeightSource(Protocol):
    """Full parameters under our names, read one at a time."""

    def names(self) -> Sequence[str]: ...

    def shape(self, name: str) -> Shape: ...

    def read_full(self, name: str) -> torch.Tensor: ...


def terms_of(objective: ObjectiveSection) -> tuple[str, ...]:
    """Loss terms, which decide the heads."""
    return objective_terms(objective)


def model_shapes(model: TransformerSection, terms: Sequence[str]) -> dict[str, Shape]:
    """Name and shape of every parameter of the model, built without memory (meta device)."""
    module = build_module(model, terms, "meta")
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def build_module(model: TransformerSection, terms: Sequence[str], device: str) -> torch.nn.Module:
    """The plain module of the model with uninitialised parameters, in evaluation mode."""
    kernels = choose_kernels(KernelsConfig(), "cpu", torch.float32, False, causal=model.is_decoder)
    with torch.device(device):
        module = LayerSequence(build_layer_list(model, tuple(terms), kernels, False))
    return module.eval()


class HuggingFaceWeights:
    """A local folder of one of the classes of key_maps.py under our names."""

    def __init__(self, folder: Path) -> None:
        """Raises ExportError where the folder is none of them, or holds no safetensors."""
        self.model, pad_id = from_hf_config(folder)
        self._files = SafetensorsFolder(folder)
        file_names = self._files.names()
        self.terms = _terms_in(self.model, file_names)
        self.key_map = build_key_map(self.model, self.terms, pad_id)
        self._assignment = assign(self.key_map, file_names, str(folder))
        self._rows: dict[str, Row] = {row.ours: row for row in self.key_map.rows}
        self._check_doubles(folder)
        self._report(folder)

    def names(self) -> list[str]:
        return list(self._rows)

    def shape(self, name: str) -> Shape:
        row = self._rows[name]
        shapes = [self._files.shape(self._assignment.stored[theirs]) for theirs in row.theirs]
        return our_shape(row, shapes, self.key_map)

    def read_full(self, name: str) -> torch.Tensor:
        """One of our parameters in fp32, put together from theirs."""
        return convert(self.key_map, self._read, self._rows[name])

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
        for row in self.key_map.rows:
            if row.kind == "offset_positions" and bool(self._read(row.theirs[1])[1:].any()):
                logger.warning(
                    "%s: %s has more than one row; only row 0, the one RobertaForMaskedLM uses by itself, is kept",
                    folder, row.theirs[1],
                )  # fmt: skip


def _terms_in(model: TransformerSection, file_names: Sequence[str]) -> tuple[str, ...]:
    """Loss terms whose heads the files hold; config.json is no guide (bert-base-uncased declares BertForMaskedLM)."""
    if model.is_decoder:
        return (CAUSAL_LM,)
    wanted = {name for row in expand(BERT_NEXT_SENTENCE_ROWS, 0) for name in row.theirs}
    if model.family == "bert" and wanted <= set(file_names):
        return ("masked_lm", "next_sentence")
    return ("masked_lm",)
