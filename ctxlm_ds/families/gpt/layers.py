"""GPT (Radford 2018) and GPT-2 (Radford 2019) as a list of layers."""

from __future__ import annotations

import math

from ctxlm_ds.families.gpt.config import GptSection
from ctxlm_ds.kernels.attention import AttentionSpec
from ctxlm_ds.models.build import ModelBuild
from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.parts.embeddings import PositionEmbeddings, WordTable
from ctxlm_ds.models.parts.transformer import BlockSettings, final_layer_norm, transformer_blocks
from ctxlm_ds.parallel.parameters import Normal


def gpt1_layers(model: GptSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers of GPT: LayerNorm after attention and feed-forward."""
    return _layers(model, build, pre_layer_norm=False, residual_range=model.initializer_range)


def gpt2_layers(model: GptSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers of GPT-2: LayerNorm before attention and feed-forward, and after the last layer.

    The matrices that end on the residual stream begin smaller by sqrt(2 x layers) (Radford 2019, section 2.3).
    """
    residual_range = model.initializer_range / math.sqrt(2 * model.num_layers)
    return _layers(model, build, pre_layer_norm=True, residual_range=residual_range)


def _layers(
    model: GptSection, build: ModelBuild, pre_layer_norm: bool, residual_range: float
) -> list[LayerDescription]:
    """List the layers that write logits [b, s, v] at every position ([b·s, v] under sequence parallelism)."""
    assert model.vocab_size is not None
    width, init = model.hidden_size, Normal(model.initializer_range)
    table = WordTable(model.vocab_size, width, init, build)
    settings = BlockSettings(
        hidden_size=width,
        num_heads=model.num_attention_heads,
        intermediate_size=model.intermediate_size,
        activation=model.hidden_activation,
        norm_eps=model.layer_norm_eps,
        hidden_dropout=model.hidden_dropout,
        attention=AttentionSpec(
            head_size=width // model.num_attention_heads,
            causal=True,
            dropout=model.attention_dropout,
            shares_rows=build.shares_rows,
        ),
        pre_layer_norm=pre_layer_norm,
        init=init,
        residual_init=Normal(residual_range),
    )
    positions = {
        "num_positions": model.max_position_embeddings, "width": width, "dropout": model.hidden_dropout, "init": init,
        "kernels": build.kernels, "parallel": build.parallel,
    }  # fmt: skip
    return [
        table.look_up(),
        LayerDescription("embeddings", PositionEmbeddings, ("hidden", "position_ids"), ("hidden",), positions),
        *transformer_blocks("decoder", model.num_layers, settings, build),
        *([final_layer_norm(width, model.layer_norm_eps, build)] if pre_layer_norm else []),
        table.decode("hidden", "logits", split_tokens=build.parallel.splits_tokens),
    ]
