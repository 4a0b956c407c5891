"""From the model's configuration to its list of layers, and to a plain module with its initial values."""

from __future__ import annotations

from collections.abc import Sequence

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.decoder import decoder_layers
from ctxlm_ds.models.encoder import encoder_layers
from ctxlm_ds.models.initialize import initialize_parameters
from ctxlm_ds.models.layer_list import LayerDescription, LayerSequence
from ctxlm_ds.parallel.context import ParallelContext


def build_layer_list(
    config: TransformerSection,
    terms: Sequence[str],
    kernels: KernelSet,
    activation_checkpointing: bool = False,
    compile_layers: bool = False,
    parallel: ParallelContext | None = None,
) -> list[LayerDescription]:
    """The model's layers in order, not built yet; `terms` are the objective's loss terms (its heads).

    `parallel` is this rank's share of every layer; None is the whole model.

    Raises ConfigError where the shape is impossible: vocab_size unset, or heads that do not divide the width.
    """
    if config.vocab_size is None:
        raise ConfigError("model.vocab_size is not set: give it in the recipe or take the tokenizer's size")
    if config.hidden_size % config.num_attention_heads:
        raise ConfigError(
            f"model.num_attention_heads: {config.num_attention_heads} heads do not divide "
            f"model.hidden_size {config.hidden_size}"
        )
    parallel = parallel or ParallelContext()
    if config.is_decoder:
        return decoder_layers(config, kernels, parallel, activation_checkpointing, compile_layers)
    return encoder_layers(config, terms, kernels, parallel, activation_checkpointing, compile_layers)


def build_model(
    config: TransformerSection,
    terms: Sequence[str],
    kernels: KernelSet,
    seed: int,
    activation_checkpointing: bool = False,
    compile_layers: bool = False,
) -> LayerSequence:
    """The model as one module with its initial values; on torch's `meta` device the shapes alone."""
    model = LayerSequence(build_layer_list(config, terms, kernels, activation_checkpointing, compile_layers))
    initialize_parameters(model, config, seed)
    return model
