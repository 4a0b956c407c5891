"""Conversion of checkpoints to plain Hugging Face folders and back, one parameter at a time, proved by the logits.

Weights of another system (export/foreign) become such a folder too.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ctxlm_ds.atomic import is_same, output_folder, read_object
from ctxlm_ds.checkpoint.chunk_index import write_weights
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, check_output, find_verified, list_checkpoints
from ctxlm_ds.checkpoint.manifest import MANIFEST_NAME
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.console import logger
from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import CardText, FamilyExport, OwnFormat, Tensors, export_of, own_format_in, own_format_of
from ctxlm_ds.export.hf_config import EXPORT_RECORD, OTHER_TOKENIZER, to_hf_config
from ctxlm_ds.export.key_maps import KeyMap, Row
from ctxlm_ds.export.model_card import CARD_MARK, write_model_card
from ctxlm_ds.export.safetensors_files import DEFAULT_SHARD_BYTES, HEADS_FILE, write_heads, write_model
from ctxlm_ds.export.verify import ROUNDING_BOUNDS, Comparison, compare_weights, verify_folder
from ctxlm_ds.export.weights import (
    IMPORT_RECORD,
    KEPT_SETTINGS,
    CheckpointSource,
    HuggingFaceWeights,
    check_source,
    open_checkpoint,
)
from ctxlm_ds.models.program import plain_program
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.check import find_problems
from ctxlm_ds.recipe.load import dump_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import EMA_KIND, DataSection, ModelSection
from ctxlm_ds.registry import FAMILIES, OBJECTIVES
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.untrusted_json import read_json_object

DEFAULT_SEQ_LENGTH = DataSection.model_fields["seq_length"].default


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion with its proof."""

    source: Path
    output: Path
    hf_class: str
    pipeline: str | None
    """The pipeline of transformers that uses the model, if there is one."""
    num_parameters: int
    comparisons: list[Comparison]
    loading: str | None = None
    """Python that loads `{folder}` if transformers does not (OwnFormat)."""


def to_hf(
    checkpoint: Path, output: Path, dtype: str = "fp32", max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    averaged: bool = False,
) -> Conversion:  # fmt: skip
    """Write a checkpoint as a folder that transformers loads: weights, config, tokenizer and model card.

    `checkpoint` is the folder of a run (its newest checkpoint that verifies) or of one checkpoint, `dtype` (fp32, bf16
    or fp16) the type of the weights, whose files are split at `max_shard_bytes`, `averaged` takes the moving averages
    (training.ema). `output` appears only when its logits
    have been proved. Raises CheckpointError if there is no intact checkpoint, ExportError if no plain class computes
    this model or the logits differ.
    """
    old_card = output / "README.md"
    is_earlier_export = old_card.is_file() and CARD_MARK in old_card.read_text(encoding="utf-8", errors="replace")
    check_output(output, checkpoint, is_earlier_export or read_object(output / EXPORT_RECORD) is not None)
    source = open_checkpoint(checkpoint, averaged=averaged)
    made_of = _export_record(source.folder, dtype, max_shard_bytes, averaged)
    own = own_format_of(source.model.family)
    if own is not None:
        return _to_own_format(own, source, output, dtype, max_shard_bytes, made_of)
    export = export_of(source.model.family)
    tokenizer = load_tokenizer(source.folder / "tokenizer")
    parts = [(part, part.shared_outputs(source.outputs)) for part in export.models()]
    key_maps = [part.key_map(source.model, outputs, tokenizer.pad_id) for part, outputs in parts]
    _check_tokenizer(tokenizer, source.model)
    program = check_source(source.reader, lambda: source.program, source.folder)
    trained = build_objective(source.config.objective, tokenizer).generation_settings if source.train_state else {}
    hf_class, text = key_maps[0].hf_class, _card_text(*parts[0], tokenizer)
    with output_folder(output) as folder:
        for (part, outputs), key_map in zip(parts, key_maps, strict=True):
            logger.info("exporting %s as %s in %s", source.folder, key_map.hf_class, dtype)
            place = folder / part.folder
            place.mkdir(exist_ok=True)
            _copy_tokenizer(source, place, part)
            write_model(place, key_map, source.reader, dtype, max_shard_bytes)
            config = to_hf_config(part, source.model, key_map.hf_class, tokenizer, dtype, source.kept_settings, trained)
            config.to_json_file(place / "config.json")
            size = program.num_parameters
            if len(parts) > 1:
                size = sum(math.prod(program.shapes[name]) for name in {row.ours for row in key_map.rows})
            words, layers = _card_text(part, outputs, tokenizer), part.num_blocks(source.model)
            card = write_model_card(source, words, key_map.hf_class, dtype, size, layers)
            (place / "README.md").write_text(card, encoding="utf-8")
        heads = sorted(program.shapes.keys() - {row.ours for key_map in key_maps for row in key_map.rows})
        if heads:
            write_heads(folder, source.reader, heads, dtype)
            logger.info("%s has no place for %s; %s keeps them", hf_class, ", ".join(heads), HEADS_FILE)
        (folder / EXPORT_RECORD).write_text(json.dumps(made_of, indent=1) + "\n", encoding="utf-8")
        comparisons = verify_folder(folder, source.reader, source.model, source.outputs, tokenizer, dtype)
    return Conversion(source.folder, output, hf_class, text.task, program.num_parameters, comparisons)


def _to_own_format(
    own: OwnFormat, source: CheckpointSource, output: Path, dtype: str, max_shard_bytes: int, made_of: dict[str, Any]
) -> Conversion:
    """Write a folder of a family's own format, whose weights are compared when they have been read back."""
    logger.info("exporting %s as %s", source.folder, own.title)
    program = check_source(source.reader, lambda: source.program, source.folder)
    _check_tokenizer(load_tokenizer(source.folder / "tokenizer"), source.model)
    rows = tuple(Row(name, (name,)) for name in program.shapes)
    with output_folder(output) as folder:
        _copy_tokenizer(source, folder)
        write_model(folder, KeyMap("", rows), source.reader, dtype, max_shard_bytes)
        config = {"model_type": source.model.family, **source.model.model_dump(mode="json")}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        own.write(folder, source.model, source.reader)
        (folder / EXPORT_RECORD).write_text(json.dumps(made_of, indent=1) + "\n", encoding="utf-8")
        written, bound = own.open(folder).source, 0.0 if dtype == "fp32" else ROUNDING_BOUNDS[dtype]
        comparison = compare_weights(source.reader, written, bound)
        if not comparison.holds:
            raise ExportError(f"the weights that were written are others: {comparison}")
    return Conversion(source.folder, output, own.title, None, program.num_parameters, [comparison], own.loading)


def _card_text(export: FamilyExport, outputs: Sequence[str], tokenizer: Tokenizer) -> CardText:
    return export.card(outputs, tokenizer.id_to_token(tokenizer.mask_id) if tokenizer.has_mask else "")


def is_exported(checkpoint: Path, output: Path, dtype: str, max_shard_bytes: int, averaged: bool = False) -> bool:
    """Return whether `output` is the finished export of a checkpoint, or of the newest one of a run.

    Raises CheckpointError if there is no intact checkpoint, ExportError with the differences if the folder was made of
    something else.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    recorded = read_object(output / EXPORT_RECORD)
    newest = max(list_checkpoints(checkpoint / CHECKPOINTS_DIR).items(), default=(0, checkpoint))[1]
    if recorded is not None and recorded == _export_record(newest, dtype, max_shard_bytes, averaged):
        return True
    wanted = _export_record(find_verified(checkpoint)[0], dtype, max_shard_bytes, averaged)
    return is_same(output, recorded, wanted, "remove it (to-hf: --overwrite), or give another --output", ExportError)


def _export_record(checkpoint: Path, dtype: str, max_shard_bytes: int, averaged: bool) -> dict[str, Any]:
    """Return what an export is made of; `manifest` is None if the checkpoint has none."""
    manifest = checkpoint / MANIFEST_NAME
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else None
    record = {"checkpoint": checkpoint.name, "manifest": digest, "dtype": dtype, "max_shard_bytes": max_shard_bytes}
    return {**record, "weights": EMA_KIND} if averaged else record


def _check_tokenizer(tokenizer: Tokenizer, model: ModelSection) -> None:
    assert model.vocab_size is not None
    if tokenizer.output_size > model.vocab_size:
        raise ExportError(
            f"the tokenizer has {tokenizer.output_size} ids, the model only {model.vocab_size}: {OTHER_TOKENIZER}"
        )


def _copy_tokenizer(source: CheckpointSource, folder: Path, export: FamilyExport | None = None) -> None:
    """Copy the tokenizer's files; its settings follow the rows that the model was trained on and its class."""
    for path in (source.folder / "tokenizer").iterdir():
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    config_path = folder / "tokenizer_config.json"
    config = read_json_object(config_path, ExportError) if config_path.is_file() else {}
    if export is not None:
        config |= export.tokenizer_settings
        if export.num_token_types(source.model) > 1:
            config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    trained, longest = source.trained_length, source.model.longest_sequence
    if trained is not None:
        config["model_max_length"] = trained
    if trained != longest:
        effect = (
            "positions %s to %s of the exported model have random weights"
            if source.model.learned_positions
            else "the exported model never saw positions %s to %s"
        )
        logger.warning(
            f"the run trained on rows of %s tokens, so {effect}; model_max_length of the tokenizer is %s",
            trained, trained, longest, trained,
        )  # fmt: skip
    config_path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def from_hf(model: Path, output: Path, new_head: bool = False) -> Conversion:
    """Write a local Hugging Face folder as weights that `initialize_from` and `to_hf` read.

    With `new_head` heads that it lacks, as a bare BertModel does, start from initial values, and others are left out.

    The new folder holds weights in the layout-free form, config.yaml (copy its model section into the new run's recipe)
    and tokenizer/. It appears only when its logits have been proved. Raises ExportError if the folder is of none of
    these classes, has no safetensors, or the logits differ, TokenizerError if it has no usable tokenizer.
    """
    if not model.is_dir():
        raise ExportError(f"{model}: no such folder; give a local folder (names on the Hub are not looked up)")
    check_output(output, model, (output / IMPORT_RECORD).is_file())
    own = own_format_in(model)
    if own is not None:
        raise ExportError(f"{model} holds {own.title}, which need no conversion: give the folder as initialize_from")
    source = HuggingFaceWeights(model, new_head=new_head)
    tokenizer = load_tokenizer(model)
    _check_tokenizer(tokenizer, source.model)
    problem = source.export.tokenizer_problem(source.pad_id, tokenizer)
    if problem is not None:
        raise ExportError(f"{model}: {problem}")
    config = _imported_config(source, model, output)
    with output_folder(output) as folder:
        tokenizer.save(folder / "tokenizer")
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        record = {"hf_class": source.key_map.hf_class, "folder": str(model.resolve()), KEPT_SETTINGS: source.kept}
        (folder / IMPORT_RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        write_weights(folder, 0, {name: source.program.shapes[name] for name in source.names()}, source.read_finite)
        ours, tokenizer = CheckpointReader(folder), load_tokenizer(folder / "tokenizer")
        if source.fresh:
            logger.info("initial values: %s", ", ".join(sorted(source.fresh)))
            with TemporaryDirectory(dir=output.parent) as place:
                comparisons = to_hf(folder, Path(place) / "hf").comparisons
        else:
            comparisons = verify_folder(model, ours, source.model, source.outputs, tokenizer)
    pipeline = source.export.card(source.outputs, "").task
    return Conversion(model, output, source.key_map.hf_class, pipeline, source.program.num_parameters, comparisons)


def _imported_config(source: HuggingFaceWeights, folder: Path, output: Path) -> RunConfig:
    """Return a recipe with the model's section, and an objective and rows that fit its heads."""
    objective, sample_format = _training_for(source.model.family, source.outputs)
    longest = source.model.longest_sequence or DEFAULT_SEQ_LENGTH
    seq_length = longest if OBJECTIVES.get(objective["name"]).shifted else min(DEFAULT_SEQ_LENGTH, longest)
    settings = {
        "name": folder.resolve().name,
        "model": source.model,
        "tokenizer": {"path": str(output / "tokenizer")},
        "objective": objective,
        "data": {"sample_format": sample_format, "seq_length": seq_length},
    }
    try:
        config = RunConfig.model_validate(settings)
    except ValueError as error:
        raise ExportError(f"{folder} does not make a valid recipe: {error}") from error
    problems = "; ".join(problem.line() for problem in find_problems(config))
    if problems:
        raise ExportError(f"{folder}: a model with these heads and settings cannot be trained here: {problems}")
    return config


def _training_for(name: str, outputs: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return the family's objective and sample format, or another one's if its objective needs other heads."""
    for family in map(FAMILIES.get, (name, *FAMILIES.names())):
        objective = OBJECTIVES.get(family.objective)
        for needed, settings in {objective.outputs: {}, **objective.for_outputs}.items():
            if set(needed) == set(outputs):
                return {"name": family.objective, **settings}, family.sample_format
    raise ExportError(f"a model of family {name} cannot be imported: no objective for {', '.join(outputs)}")


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


def cut_vocabulary(tensors: dict[str, torch.Tensor], size: int, folder: Path) -> None:
    """Cut padded tables, in place, to the `size` of the tokenizer; raise ExportError if one has fewer rows."""
    for name in [name for name in ("word_embeddings.weight", "mlm_bias.bias") if name in tensors]:
        rows = tensors[name].shape[0]
        if rows < size:
            raise ExportError(f"{folder}: {name} has {rows} rows, the tokenizer {size} ids: {OTHER_TOKENIZER}")
        tensors[name] = tensors[name][:size]
