"""RoBERTa and BART of fairseq as our parameters (fairseq/models/{roberta,bart}/model.py; checkpoints since 2019)."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ctxlm_ds.console import logger
from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.foreign.torch_files import Opaque, as_number, depth_of, flatten, read_torch_file, renamed, required
from ctxlm_ds.export.huggingface import Conversion, ForeignWeights, cut_vocabulary, write_plain_folder
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer

MODEL_FILE = "model.pt"
LEAF = r"\.(weight|bias)"
LAYER = r"(encoder|decoder)\.layers\.(\d+)\."
CROSS = r"decoder\.layers\.(\d+)\.encoder_attn"
NAMES: tuple[tuple[str, str], ...] = (
    (r"(?:encoder|decoder)\.(?:embed_tokens|output_projection)\.weight", "word_embeddings.weight"),
    (r"encoder\.embed_positions\.weight", "embeddings.position_embeddings.weight"),
    (r"encoder\.(?:emb_layer_norm|layernorm_embedding)" + LEAF, "embeddings.layer_norm.{}"),
    (r"decoder\.embed_positions\.weight", "decoder_embeddings.position_embeddings.weight"),
    (r"decoder\.layernorm_embedding" + LEAF, "decoder_embeddings.layer_norm.{}"),
    (LAYER + r"self_attn\.in_proj_(weight|bias)", "{}.{}.attention.qkv.{}"),
    (LAYER + r"self_attn\.out_proj" + LEAF, "{}.{}.attention.output.{}"),
    (LAYER + "self_attn_layer_norm" + LEAF, "{}.{}.attention_layer_norm.{}"),
    (LAYER + "fc1" + LEAF, "{}.{}.mlp.up.{}"),
    (LAYER + "fc2" + LEAF, "{}.{}.mlp.down.{}"),
    (LAYER + "final_layer_norm" + LEAF, "{}.{}.mlp_layer_norm.{}"),
    (CROSS + r"\.(query|key_value)" + LEAF, "decoder.{}.cross_attention.{}.{}"),
    (CROSS + r"\.out_proj" + LEAF, "decoder.{}.cross_attention.output.{}"),
    (CROSS + "_layer_norm" + LEAF, "decoder.{}.cross_attention_layer_norm.{}"),
    (r"(encoder|decoder)\.layer_norm" + LEAF, "{}_layer_norm.{}"),
    (r"encoder\.lm_head\.dense" + LEAF, "heads.mlm_transform.{}"),
    (r"encoder\.lm_head\.layer_norm" + LEAF, "heads.mlm_layer_norm.{}"),
    (r"encoder\.lm_head\.bias", "mlm_bias.bias"),
    (r"encoder\.lm_head\.weight", "word_embeddings.weight"),
)
"""Pattern of a name of theirs -> ours, with {} for each group."""
PART = re.compile(r"(.*\.(?:self|encoder)_attn\.)([qkv])_proj\.(weight|bias)")
CROSS_PART = re.compile(r"(.*\.encoder_attn\.)in_proj_(weight|bias)")
POSITIONS = "embeddings.position_embeddings.weight"
FIRST_IDS = {"cls": 0, "pad": 1, "sep": 2}
"""Ids of <s>, <pad> and </s> in every dictionary of fairseq."""
ACTIVATIONS = {"gelu": "gelu", "gelu_accurate": "gelu_tanh", "relu": "relu"}
"""fairseq/modules/gelu.py: `gelu` is the exact form."""
LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True)
class Kind:
    """A model of fairseq."""

    title: str
    unused: str
    """Pattern of tensors that our model has no place for."""
    only: Mapping[str, Any]
    """Arguments that change the function, with the only value that the class of transformers computes."""


ROBERTA = Kind(
    "RoBERTa", r"classification_heads\..*|encoder\.(?:version|embed_positions\._float_tensor)",
    {
        "encoder_normalize_before": False, "untie_weights_roberta": False, "no_scale_embedding": True,
        "layernorm_embedding": True, "encoder_learned_pos": True,
    },
)  # fmt: skip
BART = Kind(
    "BART", r"classification_heads\..*|(?:encoder|decoder)\.version",
    {
        "layernorm_embedding": True, "encoder_learned_pos": True, "decoder_learned_pos": True,
        "share_all_embeddings": True, "cross_self_attention": False,
    },
)  # fmt: skip


def from_fairseq(checkpoint: Path, tokenizer_folder: Path, output: Path) -> Conversion:
    """Write a RoBERTa, BART or mBART of fairseq as a plain Hugging Face folder.

    Raises ExportError if it is another model, computes what no plain class does, or the file is damaged, TokenizerError
    if the folder has no usable tokenizer.
    """
    tokenizer = load_tokenizer(tokenizer_folder)
    path = checkpoint / MODEL_FILE if checkpoint.is_dir() else checkpoint
    return write_plain_folder(fairseq_weights(path, tokenizer), tokenizer, output)


def fairseq_weights(path: Path, tokenizer: Tokenizer) -> ForeignWeights:
    """Return the parameters under our names; the vocabulary is cut to the tokenizer's."""
    content = read_torch_file(path)
    model = content.get("model")
    if not isinstance(model, dict):
        raise ExportError(f"{path}: holds no model of fairseq")
    _check_dictionary(tokenizer)
    tensors = flatten(model)
    convert = _bart if any(".encoder_attn." in name for name in tensors) else _roberta
    family, settings, tensors = convert(_arguments(content, path), tensors, path)
    cut_vocabulary(tensors, tokenizer.vocab_size, path)
    settings |= {
        "hidden_size": required(tensors, "word_embeddings.weight", path).shape[1],
        "num_layers": depth_of(tensors, "encoder"),
        "intermediate_size": required(tensors, "encoder.0.mlp.up.weight", path).shape[0],
        "max_position_embeddings": required(tensors, POSITIONS, path).shape[0] - 1 - FIRST_IDS["pad"],
    }
    return ForeignWeights(path, family, settings, tensors)


def _check_dictionary(tokenizer: Tokenizer) -> None:
    wrong = [f"{role} {getattr(tokenizer, f'{role}_id')}, not {number}" for role, number in FIRST_IDS.items()
             if getattr(tokenizer, f"{role}_id") != number]  # fmt: skip
    if wrong:
        raise ExportError(
            f"the tokenizer has {', '.join(wrong)}: fairseq's dictionary begins with <s>, <pad>, </s>, <unk>; give the "
            "tokenizer with the ids of the model's dict.txt"
        )


Converted = tuple[str, dict[str, Any], dict[str, torch.Tensor]]
"""Family, settings that the arguments decide, and parameters under our names."""


def _roberta(values: dict[str, Any], tensors: dict[str, torch.Tensor], path: Path) -> Converted:
    settings = _settings(values, ROBERTA, path)
    # `decoder` was the name of the encoder in 2019.
    prefix = re.compile(r"^(?:en|de)coder\.(?:sentence_encoder\.)?")
    tensors = {prefix.sub("encoder.", name): value for name, value in tensors.items()}
    return "roberta", settings, _our_tensors(_joined(tensors, path), ROBERTA, path)


def _bart(values: dict[str, Any], tensors: dict[str, torch.Tensor], path: Path) -> Converted:
    settings = _settings(values, BART, path)
    for setting, default in (("attention_heads", None), ("normalize_before", False)):
        encoder, decoder = (values.get(f"{stack}_{setting}", default) for stack in ("encoder", "decoder"))
        if encoder != decoder:
            raise ExportError(f"{path}: encoder_{setting} {encoder} and decoder_{setting} {decoder} are not the same")
    found = _our_tensors(_split_cross(_joined(tensors, path)), BART, path)
    inner_dropout = values.get("activation_dropout") or values.get("relu_dropout") or 0.0
    settings |= {
        "num_decoder_layers": depth_of(found, "decoder"),
        "activation_dropout": as_number(inner_dropout, "activation_dropout", path),
        # mbart_large and mbart_base scale by default.
        "scale_embedding": not values.get("no_scale_embedding", not str(values.get("arch", "")).startswith("mbart")),
    }
    return "mbart" if values.get("encoder_normalize_before") else "bart", settings, found


def _arguments(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the model's arguments, which are in `args` until 2020 and in `cfg` after that."""
    arguments = content.get("args")
    if arguments is None and isinstance(content.get("cfg"), dict):
        arguments = content["cfg"].get("model")
    if not isinstance(arguments, Namespace):
        kind = "an object of omegaconf" if isinstance(content.get("cfg"), Opaque) else "missing"
        raise ExportError(f"{path}: the model's arguments (args, or model in cfg) are {kind}; only a Namespace is read")
    return vars(arguments)


def _settings(values: dict[str, Any], kind: Kind, path: Path) -> dict[str, Any]:
    for name, only in kind.only.items():
        if values.get(name, only) != only:
            raise ExportError(
                f"{path}: the model was trained with {name} {values[name]}, which {kind.title}'s class of transformers "
                "cannot compute"
            )
    activation = values.get("activation_fn", "gelu")
    if activation not in ACTIVATIONS:
        raise ExportError(f"{path}: activation_fn {activation!r} is not one of {', '.join(ACTIVATIONS)}")

    def number(name: str, default: float | None = None) -> float:
        return as_number(values.get(name, default), name, path)

    return {
        "num_attention_heads": int(number("encoder_attention_heads")),
        "hidden_activation": ACTIVATIONS[activation],
        "layer_norm_eps": LAYER_NORM_EPS,
        "hidden_dropout": number("dropout", 0.1),
        "attention_dropout": number("attention_dropout", 0.1),
    }


def _joined(tensors: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """Join the separate projections of queries, keys and values of checkpoints since late 2019."""
    joined: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        match = PART.fullmatch(name)
        if match is None:
            joined[name] = value
        elif (name := f"{match[1]}in_proj_{match[3]}") not in joined:
            joined[name] = torch.cat([required(tensors, f"{match[1]}{part}_proj.{match[3]}", path) for part in "qkv"])
    return joined


def _split_cross(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split the joined projections of cross-attention into those of queries, and of keys and values."""
    split: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        match = CROSS_PART.fullmatch(name)
        if match is None:
            split[name] = value
        else:
            width = value.shape[0] // 3
            split[f"{match[1]}query.{match[2]}"] = value[:width]
            split[f"{match[1]}key_value.{match[2]}"] = value[width:]
    return split


def _our_tensors(tensors: dict[str, torch.Tensor], kind: Kind, path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    unused = [name for name in tensors if re.fullmatch(kind.unused, name)]
    if unused:
        logger.info("not part of %s's class of transformers: %s", kind.title, ", ".join(unused))
    for name in tensors.keys() - set(unused):
        ours = renamed(name, NAMES)
        if ours is None:
            raise ExportError(f"{path}: the tensor {name} is not part of fairseq's {kind.title}")
        value = tensors[name].float()
        if not torch.equal(found.setdefault(ours, value), value):
            raise ExportError(
                f"{path}: {name} differs from the word embeddings, which {kind.title}'s class of transformers "
                "cannot have"
            )
    return found
