"""GPT (Radford 2018) and GPT-2 (Radford 2019) as a list of layers.

Shape letters: b rows, s positions, m sequences of a row, h width, v this rank's vocabulary. `hidden` is [b, s, h], or
under sequence parallelism this rank's share of the flattened tokens.
"""

from __future__ import annotations

from torch import nn

from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.embeddings import SharedEmbedding, WordEmbeddings
from ctxlm_ds.models.encoder import WORD_EMBEDDINGS
from ctxlm_ds.models.layer_list import LayerDescription, Tensors
from ctxlm_ds.models.transformer import FinalLayerNorm, HiddenDropout, TransformerLayer
from ctxlm_ds.parallel.context import ParallelContext


def decoder_layers(
    config: TransformerSection,
    kernels: KernelSet,
    parallel: ParallelContext,
    activation_checkpointing: bool,
    compile_layers: bool,
) -> list[LayerDescription]:
    """First layer's input: Batch.model_inputs(); last layer's output: (logits [b, s, v],), at every position.

    Under sequence parallelism the logits are those of the flattened tokens, [b·s, v]. `kernels.attention` is causal,
    `config.vocab_size` set.
    """
    shared = {"config": config, "kernels": kernels, "parallel": parallel}
    table = {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "kernels": kernels, "parallel": parallel,
    }  # fmt: skip
    blocks = [
        LayerDescription(
            f"decoder.{index}", TransformerLayer, shared, recompute=activation_checkpointing, compile=compile_layers,
            block=True,
        )  # fmt: skip
        for index in range(config.num_layers)
    ]
    final_norm = [LayerDescription("final_layer_norm", FinalLayerNorm, shared)] if config.pre_layer_norm else []
    decode = {"decode": True, "split_tokens": parallel.splits_tokens}
    return [
        LayerDescription(WORD_EMBEDDINGS, WordEmbeddings, table, tie_key=WORD_EMBEDDINGS),
        LayerDescription("embeddings", DecoderEmbeddings, {"config": config, "parallel": parallel}),
        *blocks,
        *final_norm,
        LayerDescription("output", HiddenOnly),
        LayerDescription(WORD_EMBEDDINGS, WordEmbeddings, table, tie_key=WORD_EMBEDDINGS, call_kwargs=decode),
    ]


class DecoderEmbeddings(nn.Module):
    """Adds positions to the words, then dropout; there is no LayerNorm and there are no token types."""

    def __init__(self, config: TransformerSection, parallel: ParallelContext) -> None:
        super().__init__()
        self.position_embeddings = SharedEmbedding(config.max_position_embeddings, config.hidden_size, parallel)
        self.dropout = HiddenDropout(config.hidden_dropout, parallel)

    def forward(self, inputs: Tensors) -> Tensors:
        """(words, token_type_ids, position_ids [b, s], sequence_ids [b, s], sequence_starts [b, m + 1], …)
        -> (hidden, sequence_ids, sequence_starts): every position predicts, so the places of predictions go no further.
        """
        hidden, _, position_ids, sequence_ids, sequence_starts, *_ = inputs
        hidden = hidden + self.position_embeddings(position_ids)
        return (self.dropout(hidden, "embeddings"), sequence_ids, sequence_starts)


class HiddenOnly(nn.Module):
    """Drops what attention needed: (hidden, sequence_ids, sequence_starts) -> (hidden,)."""

    def forward(self, inputs: Tensors) -> Tensors:
        return inputs[:1]
