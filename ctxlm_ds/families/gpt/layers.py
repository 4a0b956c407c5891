"""GPT (Radford 2018) and GPT-2 (Radford 2019) as a list of layers."""

from __future__ import annotations

from ctxlm_ds.families.gpt.config import GptSection
from ctxlm_ds.models.layers import LayerDescription, ModelBuild
from ctxlm_ds.models.parts.embeddings import WordTable, input_embeddings
from ctxlm_ds.models.parts.transformer import block_settings, final_layer_norm, transformer_blocks


def gpt_layers(model: GptSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers that write logits [b, s, v] at every position ([b·s, v] under sequence parallelism)."""
    settings = block_settings(model, build, model.pre_layer_norm, causal=True, scaled_residuals=model.pre_layer_norm)
    table = WordTable(model.vocab_size, model.hidden_size, settings.init, build)
    return [
        table.look_up(),
        input_embeddings(model, build, position_range=model.position_initializer_range),
        *transformer_blocks("decoder", model.num_layers, settings, build),
        *final_layer_norm(settings, build),
        table.decode("hidden", "logits", split_tokens=build.parallel.splits_tokens),
    ]
