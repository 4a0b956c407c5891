"""The plain Hugging Face models beside ours, with the weights carried over by the project's export tables."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn

from ctxlm_ds.data.sample import IGNORE_LABEL, Batch
from ctxlm_ds.export.key_maps import KeyMap, build_key_map, convert
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.kernels.dispatch import choose_kernels
from ctxlm_ds.models.build import build_model
from ctxlm_ds.models.layer_list import LayerSequence
from ctxlm_ds.recipe.schema import KernelsConfig
from tests.encoder_batches import PAD_ID

HF_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}


def hf_config(config: TransformerSection, config_class: type) -> transformers.PretrainedConfig:
    """The Hugging Face configuration of the same shape."""
    offset, num_types = (2, 1) if config.family == "roberta" else (0, config.type_vocab_size)
    return config_class(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings + offset,
        type_vocab_size=num_types,
        hidden_act=HF_ACTIVATIONS[config.hidden_activation],
        layer_norm_eps=config.layer_norm_eps,
        hidden_dropout_prob=config.hidden_dropout,
        attention_probs_dropout_prob=config.attention_dropout,
        initializer_range=config.initializer_range,
        pad_token_id=PAD_ID,
    )


def hf_model(config: TransformerSection, terms: tuple[str, ...]) -> nn.Module:
    """The class that the model is exported as, its weights drawn by transformers."""
    name = build_key_map(config, terms, PAD_ID).hf_class
    config_class = transformers.RobertaConfig if config.family == "roberta" else transformers.BertConfig
    return getattr(transformers, name)(hf_config(config, config_class))


def randomize(model: nn.Module) -> None:
    """Add noise to every parameter, so that no bias is 0 and no norm is 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, device="cpu") * 0.1)


def our_model(
    config: TransformerSection, terms: tuple[str, ...], packing: bool = False, asked: KernelsConfig | None = None
) -> LayerSequence:
    """Our model in fp32 with the kernels asked for, or those that `auto` takes on the CPU."""
    kernels = choose_kernels(asked or KernelsConfig(), "cpu", torch.float32, packing, causal=config.is_decoder)
    return build_model(config, terms, kernels, seed=0)


def copy_weights(theirs: nn.Module, ours: nn.Module, key_map: KeyMap) -> None:
    """Give our model the weights of theirs."""
    values = dict(theirs.state_dict())
    parameters = dict(ours.named_parameters())
    assert parameters.keys() == {row.ours for row in key_map.rows}
    with torch.no_grad():
        for row in key_map.rows:
            parameters[row.ours].copy_(convert(key_map, values.__getitem__, row))


def hf_inputs(batch: Batch, config: TransformerSection) -> dict[str, Tensor]:
    """The same rows (one sequence each) as a Hugging Face model takes them."""
    inputs = {"input_ids": batch.input_ids, "attention_mask": (batch.sequence_ids > 0).long()}
    return inputs | ({"token_type_ids": batch.token_type_ids} if config.family == "bert" else {})


def hf_labels(batch: Batch) -> dict[str, Tensor]:
    """The same labels as a Hugging Face model takes them: masked ones [b, s], next-sentence ones [b]."""
    labels = torch.full_like(batch.input_ids, IGNORE_LABEL)
    rows, slots = (batch.labels["masked_lm"] != IGNORE_LABEL).nonzero(as_tuple=True)
    labels[rows, batch.prediction_positions[rows, slots]] = batch.labels["masked_lm"][rows, slots]
    pairs = {"next_sentence_label": batch.labels["next_sentence"][:, 0]} if "next_sentence" in batch.labels else {}
    return {"labels": labels} | pairs
