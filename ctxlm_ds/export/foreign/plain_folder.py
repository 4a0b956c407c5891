"""Weights of another system as a plain Hugging Face folder, proved by the logits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ctxlm_ds.atomic import output_folder
from ctxlm_ds.checkpoint.folders import check_output
from ctxlm_ds.console import logger
from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import Tensors, export_of
from ctxlm_ds.export.hf_config import OTHER_TOKENIZER, to_hf_config
from ctxlm_ds.export.huggingface import Conversion
from ctxlm_ds.export.safetensors_files import write_model
from ctxlm_ds.export.verify import verify_folder
from ctxlm_ds.export.weights import IMPORT_RECORD, check_source
from ctxlm_ds.models.program import plain_program
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.registry import FAMILIES
from ctxlm_ds.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class ForeignWeights:
    """Complete parameters under our names."""

    folder: Path
    family: str
    settings: Mapping[str, Any]
    """Settings of the family's section."""
    tensors: Mapping[str, torch.Tensor]
    warnings: Sequence[str] = ()
    """What the plain class computes in another way than the system."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the outputs whose heads are among the tensors."""
        possible = FAMILIES.get(self.family).outputs
        if len(possible) == 1:
            return tuple(possible)
        with_sentences = "heads.nsp_classifier.weight" in self.tensors
        return ("predicted_logits", "sentence_logits") if with_sentences else ("predicted_logits",)


def write_plain_folder(weights: ForeignWeights, tokenizer: Tokenizer, output: Path) -> Conversion:
    """Write weights, config and tokenizer as a folder that transformers loads; it appears when its logits are proved.

    Raises CheckpointError if `output` is no import or the tensors do not fit the settings, ExportError if no class of
    transformers computes the model or the logits differ.
    """
    check_output(output, weights.folder, (output / IMPORT_RECORD).is_file())
    export = export_of(weights.family)
    model, source = _section(weights, tokenizer), Tensors(dict(weights.tensors))
    described = check_source(source, lambda: plain_program(model, weights.outputs), weights.folder)
    key_map = export.key_map(model, weights.outputs, tokenizer.pad_id)
    problem = export.tokenizer_problem(tokenizer.pad_id, tokenizer)
    if problem is not None:
        raise ExportError(f"{tokenizer.facts.source}: {problem}")
    for warning in weights.warnings:
        logger.warning("%s: %s", weights.folder, warning)
    with output_folder(output) as folder:
        tokenizer.save(folder)
        write_model(folder, key_map, source)
        to_hf_config(export, model, key_map.hf_class, tokenizer, "fp32").to_json_file(folder / "config.json")
        record = {"hf_class": key_map.hf_class, "folder": str(weights.folder.resolve())}
        (folder / IMPORT_RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        comparisons = verify_folder(folder, source, model, weights.outputs, tokenizer)
    pipeline = export.card(weights.outputs, "").task
    return Conversion(weights.folder, output, key_map.hf_class, pipeline, described.num_parameters, comparisons)


def _section(weights: ForeignWeights, tokenizer: Tokenizer) -> ModelSection:
    try:
        section: ModelSection = FAMILIES.get(weights.family).section.model_validate(
            {"family": weights.family, "vocab_size": tokenizer.vocab_size, **weights.settings}
        )
    except ValueError as error:
        raise ExportError(f"{weights.folder}: its settings describe no model of this project: {error}") from error
    problems = "; ".join(problem.line() for problem in section.problems())
    if problems:
        raise ExportError(f"{weights.folder}: {problems}")
    return section


def cut_vocabulary(tensors: dict[str, torch.Tensor], names: Sequence[str], size: int, folder: Path) -> None:
    """Cut padded tables, in place, to the `size` of the tokenizer; raise ExportError if one has fewer rows."""
    for name in names:
        if name not in tensors:
            continue
        rows = tensors[name].shape[0]
        if rows < size:
            raise ExportError(f"{folder}: {name} has {rows} rows, the tokenizer {size} ids: {OTHER_TOKENIZER}")
        tensors[name] = tensors[name][:size]
