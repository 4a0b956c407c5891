"""ALBERT (Lan 2020) as a list of layers."""

from __future__ import annotations

from dataclasses import replace

from ctxlm_ds.families.albert.config import AlbertSection
from ctxlm_ds.models.layers import LayerDescription, ModelBuild
from ctxlm_ds.models.parts.encoder import encoder_layers


def albert_layers(model: AlbertSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers: narrow embeddings, a projection to the hidden size, blocks with shared weights, the heads."""
    layers = encoder_layers(model, build)
    blocks = [index for index, layer in enumerate(layers) if layer.block]
    for number, index in enumerate(blocks):
        step, layer = divmod(number, model.layers_per_group)
        group = step * model.num_groups // model.num_layers
        name = f"encoder.{group * model.layers_per_group + layer}"
        layers[index] = replace(layers[index], name=name, tie_key=name)
    return layers
