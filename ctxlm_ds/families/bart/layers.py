"""BART (Lewis 2019) and mBART (Liu 2020) as a list of layers: those of the encoder, then those of the decoder."""

from __future__ import annotations

from dataclasses import replace

from ctxlm_ds.families.bart.config import POSITION_OFFSET, BartSection
from ctxlm_ds.models.layers import LayerDescription, ModelBuild
from ctxlm_ds.models.parts.decoder import decoder_block
from ctxlm_ds.models.parts.embeddings import WordTable, input_embeddings
from ctxlm_ds.models.parts.transformer import BlockSettings, block_settings, final_layer_norm, transformer_blocks


def bart_layers(model: BartSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers that write decoder_logits [b, t, v] ([b·t, v] under sequence parallelism).

    b rows, t positions of the decoder, v vocabulary of this rank. One word table is that of the encoder, of the decoder
    and of the head (fairseq's --share-all-embeddings).
    """
    encoder, decoder = _settings(model, build, causal=False), _settings(model, build, causal=True)
    words = WordTable(model.vocab_size, model.hidden_size, encoder.init, build)
    read = [
        *_embed(model, build, words, "input_ids", ""),
        *transformer_blocks("encoder", model.num_layers, encoder, build),
        *final_layer_norm(encoder, build, "encoder_layer_norm"),
    ]
    return [
        *read[:-1],
        replace(read[-1], writes=("memory",)),
        *_embed(model, build, words, "decoder_input_ids", "decoder_"),
        *(decoder_block(f"decoder.{number}", decoder, build) for number in range(model.num_decoder_layers)),
        *final_layer_norm(decoder, build, "decoder_layer_norm"),
        words.decode("hidden", "decoder_logits", split_tokens=build.parallel.splits_tokens),
    ]


def _settings(model: BartSection, build: ModelBuild, causal: bool) -> BlockSettings:
    settings = block_settings(model, build, model.pre_layer_norm, causal=causal)
    return replace(settings, inner_dropout=model.activation_dropout)


def _embed(
    model: BartSection, build: ModelBuild, words: WordTable, ids: str, stack: str
) -> tuple[LayerDescription, LayerDescription]:
    """Describe the words of a stack, and the positions, norm and dropout after them."""
    factor = model.hidden_size**0.5 if model.scale_embedding else 1.0
    positions = input_embeddings(
        model, build, stack, position_offset=POSITION_OFFSET, layer_norm=True, word_factor=factor
    )
    return words.look_up(ids), positions
