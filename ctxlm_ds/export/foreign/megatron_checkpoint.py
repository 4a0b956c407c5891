"""BERT and GPT of Megatron-LM and Megatron-DeepSpeed as our parameters, from the files of all ranks.

Formats: Megatron-LM's `torch` (iter_*/mp_rank_*/model_optim_rng.pt), DeepSpeed's engine (mp_rank_*_model_states.pt) and
pipeline (layer_*-model_*-model_states.pt).

Names: megatron/model of both systems (2020 to 2024) and megatron-core. Order of queries, keys and values by
checkpoint_version: megatron/training/checkpointing.py, fix_query_key_value_ordering.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.foreign.torch_files import as_number, depth_of, flatten, read_torch_file, renamed, required
from ctxlm_ds.export.huggingface import Conversion, ForeignWeights, cut_vocabulary, write_plain_folder
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.untrusted_json import read_text

Tensors = dict[str, torch.Tensor]
TRACKERS = {"latest_checkpointed_iteration.txt": "iter_{:0>7}", "latest": "{}"}
"""File that names the newest checkpoint -> its folder."""
RANK_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
RANK_FILES = ("model_optim_rng.pt", "model_rng.pt")


@dataclass(frozen=True)
class MegatronFiles:
    """The tensors of all ranks."""

    folder: Path
    arguments: dict[str, Any]
    version: float
    """Order of queries, keys and values (checkpoint_version)."""
    stages: list[list[Tensors]]
    """Tensors by name of each tensor-parallel rank of each stage, in the order of the layers."""


def read_megatron(path: Path) -> MegatronFiles:
    """Read a checkpoint, or the newest one of a run.

    Raises ExportError if there is none, it is of another format, or a rank's file is missing or damaged.
    """
    folder = _newest(path)
    if (folder / ".metadata").exists():
        raise ExportError(
            f"{folder} is in the format torch_dist; convert it with Megatron-LM's tools/checkpoint/convert.py to the "
            "format torch first"
        )
    layers = _numbered(folder, LAYER_FILE)
    ranks = _numbered(folder, RANK_FILE)
    if ranks:
        return _read_deepspeed(folder, ranks, layers)
    places = {match: place for match, place in _numbered(folder, RANK_FOLDER).items() if place.is_dir()}
    if not places:
        raise ExportError(
            f"{folder} has no mp_rank_* of Megatron-LM or Megatron-DeepSpeed; give the run's folder or one checkpoint"
        )
    return _collect(folder, {place: read_torch_file(_rank_file(folder)) for place, folder in places.items()})


def _newest(path: Path) -> Path:
    if not path.is_dir():
        raise ExportError(f"{path}: no such folder")
    for name, pattern in TRACKERS.items():
        if (path / name).is_file():
            text = read_text(path / name, ExportError).strip()
            folder = path / (text if text == "release" else pattern.format(text))
            if text in ("", ".", "..") or "/" in text or not folder.is_dir():
                raise ExportError(f"{path / name} names {text!r:.80}, which is no folder there")
            return folder
    return path


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[tuple[int, ...], Path]:
    """Return the entries of a folder whose complete name matches, by the numbers in the name."""
    found = {}
    for path in sorted(folder.iterdir()):
        if match := pattern.fullmatch(path.name):
            found[tuple(int(number or 0) for number in match.groups())] = path
    return found


def _rank_file(folder: Path) -> Path:
    for name in RANK_FILES:
        if (folder / name).is_file():
            return folder / name
    raise ExportError(f"{folder} has neither {' nor '.join(RANK_FILES)}: copy the checkpoint again")


def _collect(folder: Path, contents: dict[tuple[int, ...], dict[str, Any]]) -> MegatronFiles:
    """Order the files of (tensor-parallel rank, stage); a stage with several chunks has model0, model1, ..."""
    first = contents[min(contents)]
    chunks = sorted((key for key in first if re.fullmatch(r"model\d*", key)), key=lambda key: int(key[5:] or 0))
    if not chunks:
        raise ExportError(f"{folder}: its files hold no model")
    sizes = [1 + max(place[axis] for place in contents) for axis in (0, 1)]
    _check_complete(folder, contents, sizes)
    stages = [[_model(contents[rank, stage], chunk, folder) for rank in range(sizes[0])]
              for chunk in chunks for stage in range(sizes[1])]  # fmt: skip
    return _described(folder, first, stages)


def _model(content: dict[str, Any], key: str, folder: Path) -> Tensors:
    model = content.get(key)
    tensors = flatten(model) if isinstance(model, dict) else {}
    if not tensors:
        raise ExportError(f"{folder}: the file of a rank holds no {key}; copy the checkpoint again")
    return tensors


def _check_complete(folder: Path, places: Iterable[tuple[int, ...]], sizes: list[int]) -> None:
    missing = {(rank, stage) for rank in range(sizes[0]) for stage in range(sizes[1])} - set(places)
    if missing:
        rank, stage = min(missing)
        raise ExportError(f"{folder}: rank {rank} of stage {stage} is missing; copy the checkpoint again")


def _read_deepspeed(
    folder: Path, ranks: dict[tuple[int, ...], Path], layers: dict[tuple[int, ...], Path]
) -> MegatronFiles:
    """Read DeepSpeed's files; those of a pipeline hold one layer each, whose place their number gives."""
    size = 1 + max((rank for _, rank in layers), default=0)
    first = read_torch_file(ranks[min(ranks)])
    if not layers:
        _check_complete(folder, [(rank, 0) for (rank,) in ranks], [1 + max(ranks)[0], 1])
        models = [_model(read_torch_file(ranks[rank]), "module", folder) for rank in sorted(ranks)]
        return _described(folder, first, [models])
    numbers = sorted({number for number, _ in layers})
    _check_complete(folder, [(rank, numbers.index(number)) for number, rank in layers], [size, len(numbers)])
    stages = [[_named_layer(flatten(read_torch_file(layers[number, rank]))) for rank in range(size)]
              for number in numbers]  # fmt: skip
    return _described(folder, first, stages)


def _named_layer(tensors: Tensors) -> Tensors:
    """Name the tensors of one layer of a pipeline as those of the complete model."""
    if set(tensors) <= {"weight", "bias"}:
        return {f"encoder.final_layernorm.{name}": value for name, value in tensors.items()}
    if any(name.startswith(("self_attention.", "attention.")) for name in tensors):
        return {f"encoder.layers.0.{name}": value for name, value in tensors.items()}
    return {f"embedding.{name}": value for name, value in tensors.items()}


def _described(folder: Path, content: dict[str, Any], stages: list[list[Tensors]]) -> MegatronFiles:
    """Return the tensors with the arguments and the version in one rank's file."""
    version = as_number(content.get("checkpoint_version") or 0, "checkpoint_version", folder)
    arguments = content.get("args")
    if not isinstance(arguments, Namespace):
        raise ExportError(
            f"{folder}: its files hold no arguments of the run (`args`), which say how many heads the model has; save "
            "the checkpoint again with Megatron-LM"
        )
    return MegatronFiles(folder, vars(arguments), version, stages)


LAYER = r"(?:encoder|transformer|decoder)\.layers\.(\d+)\."
ATTENTION = r"(?:self_)?attention\."
LEAF = r"(weight|bias)"
PREFIX = re.compile(r"(?:(?:module|model|language_model)\.)+")
NAMES: tuple[tuple[str, str], ...] = (
    (r"(?:embedding\.)?word_embeddings\.weight", "word_embeddings.weight"),
    (r"(?:embedding\.)?position_embeddings\.weight", "embeddings.position_embeddings.weight"),
    (r"(?:embedding\.)?tokentype_embeddings\.weight", "embeddings.token_type_embeddings.weight"),
    (LAYER + r"(?:input_layernorm|input_norm)\." + LEAF, "{}.attention_layer_norm.{}"),
    (LAYER + ATTENTION + r"linear_qkv\.layer_norm_" + LEAF, "{}.attention_layer_norm.{}"),
    (LAYER + ATTENTION + r"(?:query_key_value|linear_qkv)\." + LEAF, "{}.attention.qkv.{}"),
    (LAYER + ATTENTION + r"(?:dense|linear_proj)\." + LEAF, "{}.attention.output.{}"),
    (LAYER + r"(?:post_attention_layernorm|post_attention_norm|pre_mlp_layernorm)\." + LEAF, "{}.mlp_layer_norm.{}"),
    (LAYER + r"mlp\.linear_fc1\.layer_norm_" + LEAF, "{}.mlp_layer_norm.{}"),
    (LAYER + r"mlp\.(?:dense_h_to_4h|linear_fc1)\." + LEAF, "{}.mlp.up.{}"),
    (LAYER + r"mlp\.(?:dense_4h_to_h|linear_fc2)\." + LEAF, "{}.mlp.down.{}"),
    (r"(?:encoder|transformer|decoder)\.(?:final_layernorm|final_norm)\." + LEAF, "final_layer_norm.{}"),
    (r"pooler\.dense\." + LEAF, "heads.pooler.{}"),
    (r"lm_head\.dense\." + LEAF, "heads.mlm_transform.{}"),
    (r"lm_head\.(?:layernorm|layer_norm|norm)\." + LEAF, "heads.mlm_layer_norm.{}"),
    (r"(?:lm_head|output_layer)\.bias", "mlm_bias.bias"),
    (r"binary_head\." + LEAF, "heads.nsp_classifier.{}"),
    (r"(?:word_embeddings_for_head|output_layer)\.weight", "word_embeddings.weight"),
)
"""Their names -> ours; a layer is its number, which `our_names` completes."""
UNUSED = re.compile(r".*(?:_extra_state|attention\.(?:bias|masked_bias)|rotary_pos_emb\.inv_freq)")
SPLIT_BY_ROWS = re.compile(r"word_embeddings\.weight|mlm_bias\.bias|.*\.mlp\.up\.(?:weight|bias)")
SPLIT_BY_COLUMNS = re.compile(r".*\.(?:attention\.output|mlp\.down)\.weight")
QKV = ".attention.qkv."
ONLY: dict[str, tuple[Any, ...]] = {
    "swiglu": (False,),
    "squared_relu": (False,),
    "multi_query_attention": (False,),
    "group_query_attention": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "apply_layernorm_1p": (False,),
    "untie_embeddings_and_output_weights": (False,),
    "use_rotary_position_embeddings": (False,),
    "add_position_embedding": (True,),
    "add_bias_linear": (True,),
    "normalization": ("LayerNorm", "layernorm"),
    "position_embedding_type": ("learned_absolute",),
    "num_experts": (None, [1]),
}
"""Arguments that change the function, with the values that BERT and GPT-2 have here."""

NUMBERS = {
    "hidden_dropout": "hidden_dropout",
    "attention_dropout": "attention_dropout",
    "initializer_range": "init_method_std",
}
"""Our setting -> the argument."""
LAYER_NORM_EPS = 1e-5
FUSED_GELU = (
    "with --bias-gelu-fusion Megatron-LM computes gelu's tanh form in its layers and the exact form in the "
    "masked-LM head; the converted model computes the tanh form in both, which changes logits in the fourth digit"
)


def from_megatron(checkpoint: Path, tokenizer_folder: Path, output: Path) -> Conversion:
    """Write a BERT or GPT of Megatron-LM or Megatron-DeepSpeed as a plain Hugging Face folder.

    Raises ExportError if it is another model, computes what no plain class does, or files are damaged, TokenizerError
    if the folder has no usable tokenizer.
    """
    tokenizer = load_tokenizer(tokenizer_folder)
    return write_plain_folder(megatron_weights(read_megatron(checkpoint), tokenizer.vocab_size), tokenizer, output)


def megatron_weights(files: MegatronFiles, vocab_size: int) -> ForeignWeights:
    """Return the complete parameters under our names; vocabularies are cut to `vocab_size`."""
    arguments = files.arguments
    for name, values in ONLY.items():
        if arguments.get(name, values[0]) not in values:
            raise ExportError(
                f"{files.folder}: the model was trained with {name} {arguments[name]!r}; only {values[0]!r} can be "
                "converted"
            )
    is_bert = any("lm_head." in name for stage in files.stages for name in stage[0])
    family, block = ("megatron_bert", "encoder") if is_bert else ("gpt2", "decoder")
    heads = _number(arguments, "num_attention_heads", files.folder)
    tensors = _complete_tensors(files, block, int(heads))
    cut_vocabulary(tensors, vocab_size, files.folder)
    settings = _settings(arguments, tensors, block, files.folder) | {"num_attention_heads": int(heads)}
    differs = is_bert and arguments.get("bias_gelu_fusion") and not arguments.get("openai_gelu")
    return ForeignWeights(files.folder, family, settings, tensors, [FUSED_GELU] if differs else [])


def our_names(names: Sequence[str], block: str, first_layer: int, folder: Path) -> dict[str, str]:
    """Map the names of one stage's tensors to ours, whose list of layers is `block`; ExportError for an unknown one."""
    found = {}
    for full in names:
        name = PREFIX.sub("", full, count=1) if PREFIX.match(full) else full
        if UNUSED.fullmatch(name):
            continue
        ours = renamed(name, NAMES)
        if ours is None:
            raise ExportError(f"{folder}: the tensor {full} is not part of Megatron-LM's BERT or GPT")
        layer, _, rest = ours.partition(".")
        found[full] = f"{block}.{first_layer + int(layer)}.{rest}" if layer.isdigit() else ours
    return found


def _complete_tensors(files: MegatronFiles, block: str, heads: int) -> Tensors:
    complete: Tensors = {}
    first_layer = 0
    for ranks in files.stages:
        names = our_names(list(ranks[0]), block, first_layer, files.folder)
        for theirs, ours in names.items():
            try:
                value = _joined(ours, [tensors[theirs] for tensors in ranks], heads, files.version)
            except (KeyError, RuntimeError) as error:
                text = f"{files.folder}: the ranks' parts of {theirs} do not fit together: {error}"
                raise ExportError(text) from error
            if ours in complete and not torch.equal(complete[ours], value):
                raise ExportError(
                    f"{files.folder}: {theirs} differs from the same tensor of another stage; a model with an untied "
                    "output embedding cannot be converted"
                )
            complete.setdefault(ours, value)
        first_layer += depth_of(names.values(), block)
    return complete


def _joined(name: str, parts: list[torch.Tensor], heads: int, version: float) -> torch.Tensor:
    parts = [part.float() for part in parts]
    if QKV in name:
        return torch.cat([_by_kind(part, heads // len(parts), version) for part in parts], dim=1).flatten(0, 2)
    if SPLIT_BY_ROWS.fullmatch(name):
        return torch.cat(parts)
    return torch.cat(parts, dim=1) if SPLIT_BY_COLUMNS.fullmatch(name) else parts[0]


def _by_kind(part: torch.Tensor, heads: int, version: float) -> torch.Tensor:
    """Return a rank's queries, keys and values [3 * heads * size, ...] as [3, heads, size, ...]."""
    rest = part.shape[1:]
    if version >= 2.0:
        return part.view(heads, 3, -1, *rest).transpose(0, 1)
    if version >= 1.0:
        return part.view(heads, -1, 3, *rest).movedim(2, 0)
    return part.view(3, heads, -1, *rest)


def _settings(arguments: dict[str, Any], tensors: Tensors, block: str, folder: Path) -> dict[str, Any]:
    # Before these arguments, in 2020, Megatron-LM always computed the tanh form.
    has_choice = "bias_gelu_fusion" in arguments or "openai_gelu" in arguments
    tanh = not has_choice or arguments.get("bias_gelu_fusion") or arguments.get("openai_gelu")
    eps = arguments.get("norm_epsilon") or arguments.get("layernorm_epsilon") or LAYER_NORM_EPS
    settings = {
        "hidden_size": required(tensors, "word_embeddings.weight", folder).shape[1],
        "num_layers": depth_of(tensors, block),
        "intermediate_size": required(tensors, f"{block}.0.mlp.up.weight", folder).shape[0],
        "max_position_embeddings": required(tensors, "embeddings.position_embeddings.weight", folder).shape[0],
        "hidden_activation": "gelu_tanh" if tanh else "gelu",
        "layer_norm_eps": as_number(eps, "the argument norm_epsilon", folder),
    }
    given = {ours: name for ours, name in NUMBERS.items() if arguments.get(name) is not None}
    settings |= {ours: _number(arguments, name, folder) for ours, name in given.items()}
    types = tensors.get("embeddings.token_type_embeddings.weight")
    return settings if types is None else settings | {"type_vocab_size": types.shape[0]}


def _number(arguments: dict[str, Any], name: str, folder: Path) -> float:
    return as_number(required(arguments, name, folder), f"the argument {name}", folder)
