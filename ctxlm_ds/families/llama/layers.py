"""LLaMA (Touvron 2023) as a list of layers."""

from __future__ import annotations

from dataclasses import replace

from ctxlm_ds.families.llama.config import LlamaSection
from ctxlm_ds.models.layers import LayerDescription, ModelBuild
from ctxlm_ds.models.parts.embeddings import WordTable
from ctxlm_ds.models.parts.rotary import LinearScaling, Llama3Scaling, Rotary, Scaling
from ctxlm_ds.models.parts.transformer import block_settings, final_layer_norm, transformer_blocks

HEAD = "lm_head"


def llama_layers(model: LlamaSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers that write logits [b, s, v] at every position ([b·s, v] under sequence parallelism).

    Words without positions, blocks with RMSNorm before attention and feed-forward, RMSNorm, and the decoder, which is
    the word table or a separate matrix.
    """
    settings = block_settings(model, build, pre_layer_norm=True, causal=True)
    attention = replace(settings.attention, grouped=model.key_value_heads < model.num_attention_heads)
    settings = replace(
        settings,
        attention=attention,
        num_key_value_heads=model.key_value_heads,
        rotary=Rotary(attention.head_size, model.rotary_base, model.max_position_embeddings, _scaling(model)),
        linear_bias=False,
        gated=True,
        rms_norm=True,
    )
    table = WordTable(model.vocab_size, model.hidden_size, settings.init, build)
    head = WordTable(model.vocab_size, model.hidden_size, settings.init, build, name=HEAD)
    decoder = table if model.tie_word_embeddings else head
    return [
        table.look_up(),
        *transformer_blocks("decoder", model.num_layers, settings, build),
        *final_layer_norm(settings, build),
        decoder.decode("hidden", "logits", split_tokens=build.parallel.splits_tokens),
    ]


def _scaling(model: LlamaSection) -> Scaling | None:
    if model.rotary_scaling == "linear":
        return LinearScaling(model.rotary_scaling_factor)
    if model.rotary_scaling == "llama3":
        return Llama3Scaling(
            model.rotary_scaling_factor, model.rotary_low_turns, model.rotary_high_turns, model.rotary_original_length
        )
    return None
