"""Conversion of checkpoints to plain Hugging Face folders and back, one parameter at a time, proved by the logits."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ctxlm_ds.atomic import fsync_tree, output_folder
from ctxlm_ds.checkpoint.chunk_index import WEIGHT_KIND, merge_index
from ctxlm_ds.checkpoint.chunk_writer import ChunkWriter
from ctxlm_ds.checkpoint.manifest import hash_files, list_files, write_manifest
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.checkpoint.tensor_file import LazyTensor
from ctxlm_ds.console import logger
from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import CardText, export_of
from ctxlm_ds.export.finished import EXPORT_RECORD, export_record
from ctxlm_ds.export.hf_config import to_hf_config
from ctxlm_ds.export.key_maps import KeyMap
from ctxlm_ds.export.model_card import CARD_MARK, CardFacts, read_dataset_metadata, read_evaluation, write_model_card
from ctxlm_ds.export.safetensors_files import TensorSpec, plan_shards, write_model
from ctxlm_ds.export.verify import Comparison, verify_folder
from ctxlm_ds.export.weights import (
    IMPORT_RECORD,
    KEPT_SETTINGS,
    CheckpointSource,
    HuggingFaceWeights,
    WeightSource,
    check_finite,
    describe_source,
    open_checkpoint,
)
from ctxlm_ds.recipe.check import find_problems
from ctxlm_ds.recipe.load import dump_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import DataSection, ModelSection
from ctxlm_ds.registry import FAMILIES, OBJECTIVES
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.untrusted_json import read_json_object

DEFAULT_SEQ_LENGTH = DataSection.model_fields["seq_length"].default
DEFAULT_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion with its proof."""

    source: Path
    output: Path
    hf_class: str
    task: str
    """The pipeline of transformers that uses the model."""
    num_parameters: int
    comparisons: list[Comparison]


def to_hf(
    checkpoint: Path, output: Path, dtype: str = "fp32", max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> Conversion:
    """Write a checkpoint as a folder that transformers loads: weights, config, tokenizer and model card.

    Args:
        checkpoint: a run's folder (its newest checkpoint that verifies) or one checkpoint's.
        output: the new folder; it appears only when its logits have been proved.
        dtype: fp32, bf16 or fp16, of the weights.
        max_shard_bytes: files larger than this are split.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ExportError: no plain class computes this model, or the logits differ.
    """
    check_output(output, checkpoint, _is_export(output))
    source = open_checkpoint(checkpoint)
    export = export_of(source.model.family)
    tokenizer = load_tokenizer(source.tokenizer_folder)
    key_map = export.key_map(source.model, source.outputs, tokenizer.pad_id)
    _check_tokenizer(tokenizer, source.model)
    whole = describe_source(source.reader, source.model, source.outputs, source.folder)
    logger.info("exporting %s as %s in %s", source.folder, key_map.hf_class, dtype)
    text = export.card(source.outputs, tokenizer.id_to_token(tokenizer.mask_id) if tokenizer.has_mask else "")
    with output_folder(output) as folder:
        _copy_tokenizer(source, folder)
        shards = plan_shards(their_specs(key_map, source.reader), dtype, max_shard_bytes)
        write_model(folder, shards, their_tensors(key_map, source.reader), dtype)
        config = to_hf_config(export, source.model, key_map.hf_class, tokenizer, dtype, source.kept_settings)
        config.to_json_file(folder / "config.json")
        facts = _card_facts(source, text, key_map.hf_class, dtype, whole.num_parameters)
        (folder / "README.md").write_text(write_model_card(facts), encoding="utf-8")
        record = export_record(source.folder, dtype, max_shard_bytes)
        (folder / EXPORT_RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        comparisons = verify_folder(folder, source.reader, source.model, source.outputs, tokenizer, dtype)
    return Conversion(source.folder, output, key_map.hf_class, text.task, whole.num_parameters, comparisons)


def check_output(output: Path, source: Path, is_earlier_result: bool) -> None:
    """Raise ExportError unless `output` is free or an earlier result, and does not contain the source."""
    is_free = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    if not is_free and not is_earlier_result:
        raise ExportError(f"{output} exists and is not the result of an earlier conversion; give another --output")
    if source.resolve().is_relative_to(output.resolve()):
        raise ExportError(f"{output} contains the source {source}, which it would replace; give another --output")


def _is_export(output: Path) -> bool:
    card = output / "README.md"
    return card.is_file() and CARD_MARK in card.read_text(encoding="utf-8", errors="replace")


def _check_tokenizer(tokenizer: Tokenizer, model: ModelSection) -> None:
    assert model.vocab_size is not None
    if tokenizer.vocab_size > model.vocab_size:
        raise ExportError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model only {model.vocab_size}: it is not the tokenizer "
            "that this model was trained with"
        )


def their_specs(key_map: KeyMap, source: WeightSource) -> list[TensorSpec]:
    """Return names and shapes of their tensors in the order of the table."""
    return [
        TensorSpec(name, shape)
        for row in key_map.rows
        for name, shape in zip(row.theirs, row.their_shapes(source.shape(row.ours)), strict=True)
    ]


def their_tensors(key_map: KeyMap, source: WeightSource) -> Iterator[torch.Tensor]:
    """Yield their tensors in the order of the table; one parameter of ours is in memory at a time."""
    for row in key_map.rows:
        yield from row.to_theirs(source.read_full(row.ours))


def _copy_tokenizer(source: CheckpointSource, folder: Path) -> None:
    """Copy the tokenizer's files, with the longest sequence that the model was trained on as longest input."""
    for path in source.tokenizer_folder.iterdir():
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    config_path = folder / "tokenizer_config.json"
    config = read_json_object(config_path, ExportError) if config_path.is_file() else {}
    trained, longest = source.trained_length, source.model.longest_sequence
    if trained is not None:
        config["model_max_length"] = trained
    if trained != longest:
        logger.warning(
            "the run trained on rows of %s tokens, so positions %s to %s of the exported model have random weights; "
            "model_max_length of the tokenizer is %s", trained, trained, longest, trained,
        )  # fmt: skip
    config_path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _card_facts(source: CheckpointSource, text: CardText, hf_class: str, dtype: str, num_parameters: int) -> CardFacts:
    trained = bool(source.train_state)
    step = int(source.train_state.get("step", 0))
    return CardFacts(
        config=source.config.model_copy(update={"model": source.model}),
        text=text,
        hf_class=hf_class,
        dtype=dtype,
        num_parameters=num_parameters,
        train_state=source.train_state,
        trained_length=source.trained_length,
        evaluation=read_evaluation(source.metrics_file, step) if trained else {},
        datasets=read_dataset_metadata([part.path for part in source.config.data.train]) if trained else {},
    )


def from_hf(model: Path, output: Path) -> Conversion:
    """Write a local Hugging Face folder as weights that `initialize_from` and `to_hf` read.

    Args:
        model: a folder of a class that a family's export knows, with safetensors and a tokenizer.
        output: the new folder: weights in the layout-free form, config.yaml (copy its model section into the new
            run's recipe) and tokenizer/. It appears only when its logits have been proved.

    Raises:
        ExportError: the folder is of none of these classes, has no safetensors, or the logits differ.
        TokenizerError: the folder has no usable tokenizer.
    """
    if not model.is_dir():
        raise ExportError(f"{model}: no such folder; give a local folder (names on the Hub are not looked up)")
    check_output(output, model, (output / IMPORT_RECORD).is_file())
    source = HuggingFaceWeights(model)
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
        _write_chunks(folder, source)
        fsync_tree(folder)
        write_manifest(folder, 0, hash_files(folder, list_files(folder)))
        written = CheckpointReader(folder)
        comparisons = verify_folder(model, written, source.model, source.outputs, load_tokenizer(folder / "tokenizer"))
        written.close()
    task = source.export.card(source.outputs, "").task
    return Conversion(model, output, source.key_map.hf_class, task, source.whole.num_parameters, comparisons)


def _write_chunks(folder: Path, source: WeightSource) -> None:
    writer = ChunkWriter(folder, 0)
    for name in source.names():
        shape = source.shape(name)
        writer.add(name, WEIGHT_KIND, shape, 0, LazyTensor(math.prod(shape), partial(_read_finite, source, name)))
    merge_index(folder, [writer.write().value], {})


def _read_finite(source: WeightSource, name: str) -> torch.Tensor:
    return check_finite(name, source.read_full(name), "the model")


def _imported_config(source: HuggingFaceWeights, folder: Path, output: Path) -> RunConfig:
    """Return a recipe with the model's section, and an objective and rows that fit its heads."""
    objective, sample_format = _training_for(source.model.family, source.outputs)
    longest = source.model.longest_sequence
    seq_length = min(DEFAULT_SEQ_LENGTH, longest or DEFAULT_SEQ_LENGTH)
    if OBJECTIVES.get(objective).shifted and longest is not None:
        seq_length = longest
    settings = {
        "name": folder.resolve().name,
        "model": source.model,
        "tokenizer": {"path": str(output / "tokenizer")},
        "objective": {"name": objective},
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


def _training_for(name: str, outputs: Sequence[str]) -> tuple[str, str]:
    """Return the family's objective and sample format, or another one's if its objective needs other heads."""
    for candidate in (name, *FAMILIES.names()):
        family = FAMILIES.get(candidate)
        if set(OBJECTIVES.get(family.objective).outputs) == set(outputs):
            return family.objective, family.sample_format
    raise ExportError(
        f"a model of family {name} with {', '.join(outputs)} cannot be imported: no family has an objective for these"
    )
