"""ModernBERT (Warner 2024) as a list of layers."""

from __future__ import annotations

from dataclasses import replace

from ctxlm_ds.families.modernbert.config import ModernBertSection
from ctxlm_ds.models.layers import LayerDescription, ModelBuild
from ctxlm_ds.models.parts.embeddings import WordTable
from ctxlm_ds.models.parts.heads import EncoderHeads, head_arguments
from ctxlm_ds.models.parts.rotary import Rotary
from ctxlm_ds.models.parts.transformer import BlockSettings, block_settings, final_layer_norm, transformer_block


def modernbert_layers(model: ModernBertSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers that write predicted_logits [b, p, v]: normalised words, blocks, LayerNorm, the tied head.

    Only the decoder has a bias. Matrices whose output is added to the residual stream, and the head's, begin smaller
    by the root of twice the number of layers (`full_megatron` of the authors' code).
    """
    settings = replace(
        block_settings(model, build, pre_layer_norm=True, scaled_residuals=True),
        mlp_dropout=0.0, linear_bias=False, norm_bias=False, gated=True,
    )  # fmt: skip
    table = WordTable(model.vocab_size, model.hidden_size, settings.init, build)
    heads = head_arguments(model, build, bias=False) | {"init": settings.residual_init}
    reads = ("hidden", "sequence_ids", "prediction_positions")
    return [
        table.look_up(),
        *final_layer_norm(settings, build, "embedding_layer_norm"),
        *(
            transformer_block(f"encoder.{layer}", _settings_of(layer, settings, model), build)
            for layer in range(model.num_layers)
        ),
        *final_layer_norm(settings, build),
        LayerDescription("heads", EncoderHeads, reads, ("predicted_hidden",), heads),
        *table.decode_with_bias("predicted_hidden", "mlm_bias", "predicted_logits"),
    ]


def _settings_of(layer: int, settings: BlockSettings, model: ModernBertSection) -> BlockSettings:
    """Return the settings of a layer: its window, its base, and no LayerNorm where the embeddings' is just before."""
    is_global = model.is_global(layer)
    base = model.global_rotary_base if is_global else model.local_rotary_base
    return replace(
        settings,
        attention=replace(settings.attention, window=None if is_global else model.local_attention // 2),
        attention_norm=layer > 0,
        rotary=Rotary(settings.attention.head_size, base, model.max_position_embeddings),
    )
