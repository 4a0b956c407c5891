"""An encoder with a masked-LM head as a list of layers: BERT, RoBERTa and the families like them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ctxlm_ds.models.layers import LayerDescription, ModelBuild
from ctxlm_ds.models.parts.embeddings import WordTable, input_embeddings
from ctxlm_ds.models.parts.heads import EncoderHeads, SpanBoundaryHead, head_arguments
from ctxlm_ds.models.parts.transformer import (
    BlockSettings,
    block_settings,
    final_layer_norm,
    initial_weights,
    transformer_blocks,
)
from ctxlm_ds.parallel.layers import ReplicatedLinear

if TYPE_CHECKING:
    from ctxlm_ds.families.base import EncoderSection

SENTENCE_CLASSES = 2
"""Classes of a pair of segments."""


def encoder_layers(model: EncoderSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers that write predicted_logits [b, p, v], or ranked_logits if the model is ranked.

    They write sentence_logits [b, m, classes] and boundary_logits [b, p, v] if the objective needs them.
    """
    table = word_table(model, build)
    with_sentences = "sentence_logits" in build.outputs
    num_classes = SENTENCE_CLASSES if with_sentences else 0
    heads = head_arguments(model, build, predicted_width=table.width, num_classes=num_classes)
    cls, classes = (("cls_positions",), ("sentence_logits",)) if with_sentences else ((), ())
    reads = ("hidden", "sequence_ids", "prediction_positions", *cls)
    logits = "ranked_logits" if model.ranked else "predicted_logits"
    layers = [
        *encoder_trunk(model, build),
        LayerDescription("heads", EncoderHeads, reads, ("predicted_hidden", *classes), heads),
        *table.decode_with_bias("predicted_hidden", "mlm_bias", logits),
    ]
    return layers + (boundary_layers(model, build, table) if "boundary_logits" in build.outputs else [])


def encoder_trunk(model: EncoderSection, build: ModelBuild, num_blocks: int | None = None) -> list[LayerDescription]:
    """List the layers of an encoder without heads; `num_blocks` if not all repeated layers are its own."""
    settings = block_settings(model, build, model.pre_layer_norm)
    settings = replace(settings, attention=replace(settings.attention, ranked=model.ranked))
    width = model.table_width
    return [
        word_table(model, build).look_up(),
        input_embeddings(
            model,
            build,
            position_offset=model.position_offset,
            num_token_types=model.num_token_types,
            layer_norm=model.embedding_norm,
            width=width,
        ),  # fmt: skip
        *([] if width is None else [_project_embeddings(width, settings, build)]),
        *transformer_blocks("encoder", num_blocks or model.num_blocks, settings, build),
        *final_layer_norm(settings, build),
    ]


def word_table(model: EncoderSection, build: ModelBuild) -> WordTable:
    return WordTable(model.vocab_size, model.table_width or model.hidden_size, initial_weights(model), build)


def _project_embeddings(width: int, settings: BlockSettings, build: ModelBuild) -> LayerDescription:
    """Describe the layer that maps embeddings [..., width] to the width of the blocks (Lan 2020, section 3.1)."""
    kwargs = {
        "in_features": width, "out_features": settings.hidden_size, "init": settings.init, "kernels": build.kernels,
        "parallel": build.parallel,
    }  # fmt: skip
    return LayerDescription("embedding_projection", ReplicatedLinear, ("hidden",), ("hidden",), kwargs)


def boundary_layers(model: EncoderSection, build: ModelBuild, table: WordTable) -> list[LayerDescription]:
    """List the layers that write boundary_logits [b, p, v], the words of spans predicted from their boundaries."""
    head = head_arguments(model, build, predicted_width=table.width)
    reads = ("hidden", "sequence_ids", "boundary_positions", "boundary_offsets")
    return [
        LayerDescription("boundary_head", SpanBoundaryHead, reads, ("boundary_hidden",), head),
        *table.decode_with_bias("boundary_hidden", "boundary_bias", "boundary_logits", optional=True),
    ]
