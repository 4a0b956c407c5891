"""The shape of a model as a Hugging Face config and back.

In: the model section and the tokenizer's ids, or a local folder's config.json. Out: the other one. Not here: weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.console import logger
from ctxlm_ds.errors import ExportError
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.registry import FAMILIES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ctxlm_ds.tokenizers.base import Tokenizer

FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "layer_norm_eps": "layer_norm_eps",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "initializer_range": "initializer_range",
}
"""Our field -> theirs, where the value is the same."""

GPT_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "num_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "hidden_dropout": "resid_pdrop",
    "attention_dropout": "attn_pdrop",
    "initializer_range": "initializer_range",
}
"""The same for GPT's two configs."""

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}
THEIR_ACTIVATIONS = {**{theirs: ours for ours, theirs in ACTIVATIONS.items()}, "gelu_new": "gelu_tanh"}
GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
GPT1_ACTIVATIONS = {"gelu_tanh": "gelu", "relu": "relu"}
"""OpenAIGPTLMHeadModel's `gelu` is the tanh form (transformers modeling_openai.py, ACT_FNS)."""
TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def to_hf_config(model: TransformerSection, hf_class: str, tokenizer: Tokenizer, dtype: str) -> PretrainedConfig:
    """The config of `hf_class` for `model`, with vocab_size set; `dtype` is fp32, bf16 or fp16."""
    if model.is_decoder:
        return _to_gpt_config(model, hf_class, tokenizer, dtype)
    from transformers import BertConfig, RobertaConfig

    values = {theirs: getattr(model, ours) for ours, theirs in FIELDS.items()}
    values |= {
        "hidden_act": ACTIVATIONS[model.hidden_activation],
        "pad_token_id": tokenizer.pad_id,
        "architectures": [hf_class],
        "dtype": TORCH_DTYPES[dtype],
    }
    if model.family == "bert":
        return BertConfig(
            max_position_embeddings=model.max_position_embeddings, type_vocab_size=model.type_vocab_size, **values
        )
    return RobertaConfig(
        max_position_embeddings=model.max_position_embeddings + tokenizer.pad_id + 1,
        type_vocab_size=1,
        bos_token_id=tokenizer.cls_id,
        eos_token_id=tokenizer.sep_id,
        **values,
    )


def _to_gpt_config(model: TransformerSection, hf_class: str, tokenizer: Tokenizer, dtype: str) -> PretrainedConfig:
    from transformers import GPT2Config, OpenAIGPTConfig

    values = {theirs: getattr(model, ours) for ours, theirs in GPT_FIELDS.items()}
    values |= {
        "embd_pdrop": model.hidden_dropout,
        "bos_token_id": tokenizer.cls_id,
        "eos_token_id": tokenizer.sep_id,
        "pad_token_id": tokenizer.pad_id,
        "architectures": [hf_class],
        "dtype": TORCH_DTYPES[dtype],
    }
    if model.family == "gpt1":
        return OpenAIGPTConfig(afn=GPT1_ACTIVATIONS[model.hidden_activation], **values)
    activation = GPT2_ACTIVATIONS[model.hidden_activation]
    return GPT2Config(n_inner=model.intermediate_size, activation_function=activation, **values)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """config.json of a local folder; ExportError where it is missing or not a JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        raise ExportError(f"{folder} has no config.json: give a folder written by save_pretrained")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ExportError(f"{path} is not JSON ({error}): copy the model folder again") from error
    if not isinstance(values, dict):
        raise ExportError(f"{path} holds no JSON object: copy the model folder again")
    return values


def from_hf_config(folder: Path) -> tuple[TransformerSection, int]:
    """Our shape and the padding id for a local BERT, RoBERTa, GPT-2 or GPT folder.

    Raises ExportError where the model computes something that ours cannot.
    """
    values = read_hf_config(folder)
    config = _complete(values, folder)
    _refuse_variants(values, folder)
    if config.model_type in ("gpt2", "openai-gpt"):
        return _validated(_gpt_fields(config, folder), folder), 0
    if config.hidden_act not in THEIR_ACTIVATIONS:
        raise ExportError(
            f"{folder}/config.json: hidden_act {config.hidden_act!r} is none of {', '.join(THEIR_ACTIVATIONS)}"
        )
    fields = {ours: getattr(config, theirs) for ours, theirs in FIELDS.items()}
    fields |= {"family": config.model_type, "hidden_activation": THEIR_ACTIVATIONS[config.hidden_act]}
    if config.model_type == "bert":
        fields |= {"type_vocab_size": config.type_vocab_size, "max_position_embeddings": config.max_position_embeddings}
        pad_id = config.pad_token_id or 0
    else:
        pad_id = 1 if config.pad_token_id is None else config.pad_token_id
        fields["max_position_embeddings"] = config.max_position_embeddings - pad_id - 1
    return _validated(fields, folder), pad_id


def _validated(fields: dict[str, Any], folder: Path) -> TransformerSection:
    try:
        return FAMILIES.get(fields["family"]).section.model_validate(fields)
    except ValueError as error:
        raise ExportError(f"{folder}/config.json describes no model that can be trained here: {error}") from error


def _gpt_fields(config: PretrainedConfig, folder: Path) -> dict[str, Any]:
    is_gpt2 = config.model_type == "gpt2"
    key, activations = ("activation_function", GPT2_ACTIVATIONS) if is_gpt2 else ("afn", GPT1_ACTIVATIONS)
    known = {theirs: ours for ours, theirs in activations.items()}
    known |= {"gelu_pytorch_tanh": "gelu_tanh"} if is_gpt2 else {}
    activation = getattr(config, key)
    if activation not in known:
        raise ExportError(f"{folder}/config.json: {key} {activation!r} is none of {', '.join(known)}")
    if config.embd_pdrop != config.resid_pdrop:
        logger.warning(
            "%s/config.json: embd_pdrop %s is not kept: model.hidden_dropout is resid_pdrop, %s, everywhere",
            folder, config.embd_pdrop, config.resid_pdrop,
        )  # fmt: skip
    return {ours: getattr(config, theirs) for ours, theirs in GPT_FIELDS.items()} | {
        "family": "gpt2" if is_gpt2 else "gpt1",
        "hidden_activation": known[activation],
        "intermediate_size": (config.n_inner if is_gpt2 else None) or 4 * config.n_embd,
    }


def _complete(values: dict[str, Any], folder: Path) -> PretrainedConfig:
    """The values with the class's defaults for what an older file left out."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import BertConfig, GPT2Config, OpenAIGPTConfig, RobertaConfig

    classes = {"bert": BertConfig, "roberta": RobertaConfig, "gpt2": GPT2Config, "openai-gpt": OpenAIGPTConfig}
    model_type = values.get("model_type")
    if model_type not in classes:
        raise ExportError(
            f"{folder}/config.json: model_type {model_type!r} cannot be imported; only bert, roberta, gpt2 and "
            "openai-gpt (BertForPreTraining, BertForMaskedLM, RobertaForMaskedLM, GPT2LMHeadModel, "
            "OpenAIGPTLMHeadModel)"
        )
    try:
        return classes[model_type].from_dict(values)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ExportError(f"{folder}/config.json does not fit {model_type}: {error}") from error


def _refuse_variants(values: dict[str, Any], folder: Path) -> None:
    """Settings under which the classes compute another function than the published models."""
    expected = {
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
        "position_embedding_type": "absolute",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }
    for key, value in expected.items():
        if values.get(key, value) != value:
            raise ExportError(
                f"{folder}/config.json: {key} is {values[key]!r}; only models with {key} {value!r} can be imported"
            )
