"""Checkpoints to plain Hugging Face folders and back, a parameter at a time, each conversion proved by its logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ctxlm_ds.atomic import fsync_tree, output_folder
from ctxlm_ds.checkpoint.layout_free import WEIGHT_KIND, CheckpointReader, PieceWriter, merge_index
from ctxlm_ds.checkpoint.manifest import hash_files, list_files, write_manifest
from ctxlm_ds.console import logger
from ctxlm_ds.errors import CheckpointError, ConfigError, ExportError
from ctxlm_ds.export.checkpoint_source import CheckpointSource, check_parameters, open_checkpoint
from ctxlm_ds.export.hf_config import to_hf_config
from ctxlm_ds.export.key_maps import KeyMap, build_key_map, their_shapes, to_theirs
from ctxlm_ds.export.model_card import CARD_MARK, CardFacts, read_dataset_metadata, read_evaluation, write_model_card
from ctxlm_ds.export.safetensors_files import TensorSpec, plan_shards, write_model
from ctxlm_ds.export.verify import Comparison, verify_folder
from ctxlm_ds.export.weights import HuggingFaceWeights, WeightSource, model_shapes
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.models.flops import parameter_count
from ctxlm_ds.recipe.load import dump_config
from ctxlm_ds.recipe.schema import RunConfig, TokenizerConfig
from ctxlm_ds.registry import FORMATS, OBJECTIVES
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer

DEFAULT_SHARD_BYTES = 5 * 10**9
IMPORT_RECORD = "imported_from.json"


@dataclass(frozen=True)
class Conversion:
    """What a conversion read and wrote, and its proof."""

    source: Path
    output: Path
    hf_class: str
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
        CheckpointError: no checkpoint, or a damaged one.
        ExportError: no plain class computes this model, or the logits differ.
    """
    check_output(output, checkpoint, _is_export(output))
    source = open_checkpoint(checkpoint)
    tokenizer = load_tokenizer(source.tokenizer_folder)
    key_map = build_key_map(source.model, source.terms, tokenizer.pad_id)
    _check_tokenizer(tokenizer, source.model)
    shapes = {name: source.reader.shape(name) for name in source.reader.names()}
    check_parameters(shapes, model_shapes(source.model, source.terms), source.folder)
    logger.info("exporting %s as %s in %s", source.folder, key_map.hf_class, dtype)
    with output_folder(output) as folder:
        _copy_tokenizer(source, folder)
        shards = plan_shards(their_specs(key_map, source.reader), dtype, max_shard_bytes)
        write_model(folder, shards, their_tensors(key_map, source.reader), dtype)
        to_hf_config(source.model, key_map.hf_class, tokenizer, dtype).to_json_file(folder / "config.json")
        facts = _card_facts(source, tokenizer, key_map.hf_class, dtype)
        (folder / "README.md").write_text(write_model_card(facts), encoding="utf-8")
        comparisons = verify_folder(folder, source.reader, source.model, source.terms, tokenizer, dtype)
    return Conversion(source.folder, output, key_map.hf_class, facts.num_parameters, comparisons)


def check_output(output: Path, source: Path, is_earlier_result: bool) -> None:
    """Refuse to replace anything but an empty folder or an earlier result, and a folder that holds the source."""
    is_free = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    if not is_free and not is_earlier_result:
        raise ExportError(f"{output} exists and is not the result of an earlier conversion; give another --output")
    if source.resolve().is_relative_to(output.resolve()):
        raise ExportError(f"{output} holds the source {source}, which it would replace; give another --output")


def _is_export(output: Path) -> bool:
    card = output / "README.md"
    return card.is_file() and CARD_MARK in card.read_text(encoding="utf-8", errors="replace")


def _check_tokenizer(tokenizer: Tokenizer, model: TransformerSection) -> None:
    assert model.vocab_size is not None
    if tokenizer.vocab_size > model.vocab_size:
        raise ExportError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model only {model.vocab_size}: it is not the tokenizer "
            "that this model was trained with"
        )


def their_specs(key_map: KeyMap, source: WeightSource) -> list[TensorSpec]:
    """Names and shapes of their tensors in the order of the table."""
    return [
        TensorSpec(name, shape)
        for row in key_map.rows
        for name, shape in zip(row.theirs, their_shapes(row, source.shape(row.ours), key_map), strict=True)
    ]


def their_tensors(key_map: KeyMap, source: WeightSource) -> Iterator[torch.Tensor]:
    """Their tensors in the order of the table; one parameter of ours is in memory at a time."""
    for row in key_map.rows:
        yield from to_theirs(row, source.read_full(row.ours), key_map)


def _copy_tokenizer(source: CheckpointSource, folder: Path) -> None:
    """The tokenizer's files, with the model's longest input as its own."""
    for path in source.tokenizer_folder.iterdir():
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
    config["model_max_length"] = source.model.max_position_embeddings
    config_path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _card_facts(source: CheckpointSource, tokenizer: Tokenizer, hf_class: str, dtype: str) -> CardFacts:
    trained = bool(source.train_state)
    step = int(source.train_state.get("step", 0))
    return CardFacts(
        config=source.config.model_copy(update={"model": source.model}),
        hf_class=hf_class,
        dtype=dtype,
        num_parameters=parameter_count(source.model, source.terms),
        mask_token="" if source.model.is_decoder else tokenizer.id_to_token(tokenizer.mask_id),
        train_state=source.train_state,
        evaluation=read_evaluation(source.metrics_file, step) if trained else {},
        datasets=read_dataset_metadata([part.path for part in source.config.data.train]) if trained else {},
    )


def from_hf(model: Path, output: Path) -> Conversion:
    """Write a local Hugging Face folder as weights that `initialize_from` and `to_hf` read.

    Args:
        model: a folder of a class of key_maps.py (BERT, RoBERTa, GPT-2, GPT) with safetensors and a tokenizer.
        output: the new folder: weights in the layout-free form, config.yaml (the model section is to be copied into
            the new run's recipe) and tokenizer/. It appears only when its logits have been proved.

    Raises:
        ExportError: none of these classes, no safetensors, or the logits differ.
        TokenizerError: no usable tokenizer in the folder.
    """
    if not model.is_dir():
        raise ExportError(f"{model}: no such folder; give a local folder (names on the Hub are not looked up)")
    check_output(output, model, (output / IMPORT_RECORD).is_file())
    source = HuggingFaceWeights(model)
    _check_shapes(source, model)
    tokenizer = load_tokenizer(model)
    _check_tokenizer(tokenizer, source.model)
    if source.model.family == "roberta" and tokenizer.pad_id + 1 != source.key_map.position_offset:
        raise ExportError(
            f"{model}: config.json has pad_token_id {source.key_map.position_offset - 1}, after which RoBERTa counts "
            f"positions, but the tokenizer pads with {tokenizer.pad_id}; make them equal"
        )
    with output_folder(output) as folder:
        tokenizer.save(folder / "tokenizer")
        (folder / "config.yaml").write_text(dump_config(_imported_config(source, model, output)), encoding="utf-8")
        record = {"hf_class": source.key_map.hf_class, "folder": str(model.resolve())}
        (folder / IMPORT_RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        _write_pieces(folder, source)
        fsync_tree(folder)
        write_manifest(folder, 0, hash_files(folder, list_files(folder)))
        written = CheckpointReader(folder)
        comparisons = verify_folder(model, written, source.model, source.terms, load_tokenizer(folder / "tokenizer"))
        written.close()
    count = parameter_count(source.model, source.terms)
    return Conversion(model, output, source.key_map.hf_class, count, comparisons)


def _check_shapes(source: HuggingFaceWeights, folder: Path) -> None:
    try:
        expected = model_shapes(source.model, source.terms)
        check_parameters({name: source.shape(name) for name in source.names()}, expected, folder)
    except (CheckpointError, ConfigError) as error:
        raise ExportError(f"{folder}: the weights do not fit config.json: {error}") from error


def _write_pieces(folder: Path, source: WeightSource) -> None:
    writer = PieceWriter(folder, 0)
    for name in source.names():
        writer.add(name, WEIGHT_KIND, source.shape(name), 0, source.read_full(name).flatten())
    merge_index(folder, [writer.close()], {})


def _imported_config(source: HuggingFaceWeights, folder: Path, output: Path) -> RunConfig:
    """A recipe with the model's section and an objective and rows that go with it."""
    seq_length = min(128, source.model.max_position_embeddings)
    if source.model.is_decoder:
        objective = OBJECTIVES.get("causal_lm").section()
        data = FORMATS.get("blocks").section(seq_length=source.model.max_position_embeddings)
    elif "next_sentence" in source.terms:
        objective = OBJECTIVES.get("masked_lm_nsp").section()
        data = FORMATS.get("segment_pair").section(seq_length=seq_length)
    else:
        objective = OBJECTIVES.get("masked_lm").section()
        data = FORMATS.get("full_sentences").section(seq_length=seq_length)
    return RunConfig(
        name=folder.resolve().name,
        model=source.model,
        tokenizer=TokenizerConfig(path=str(output / "tokenizer")),
        objective=objective,
        data=data,
    )
