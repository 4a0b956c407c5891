"""Decoder blocks of an encoder-decoder, which also read the encoder's output.

A stack's tensors have its name as a prefix: the decoder reads `decoder_sequence_ids` where the encoder reads
`sequence_ids`. `memory` is the encoder's output.

Shape letters: b rows, s positions of the encoder, t of the decoder, m sequences of a row, h width, n heads of this
rank, d size of a head. Under sequence parallelism hidden states are this rank's tokens, [b·s / ranks, h].
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ctxlm_ds.kernels.attention_spec import Sequences
from ctxlm_ds.models.layers import LayerDescription, ModelBuild
from ctxlm_ds.models.parts.transformer import Attention, BlockSettings, TransformerLayer, block_description, make_norm
from ctxlm_ds.parallel.layers import CROSS_ATTENTION, CROSS_ATTENTION_OUTPUT, column_parallel_linear

SEQUENCES = ("sequence_ids", "sequence_starts")
DECODER_SEQUENCES = ("decoder_sequence_ids", "decoder_sequence_starts")


def decoder_block(name: str, settings: BlockSettings, build: ModelBuild, bias: str | None = None) -> LayerDescription:
    """Describe a layer that rewrites `hidden` [b, t, h] and reads `memory` and, if given, `bias` [n, t, t]."""
    reads = ("hidden", "memory", *DECODER_SEQUENCES, *SEQUENCES, *((bias,) if bias else ()))
    return block_description(name, DecoderLayer, reads, settings, build, {})


class CrossAttention(Attention):
    """Multi-head attention of the decoder's tokens to the encoder's (Vaswani 2017, section 3.2.3)."""

    def __init__(self, settings: BlockSettings, build: ModelBuild) -> None:
        spec = replace(settings.attention, causal=False, window=None, bias=False, by_distance=False, cross=True)
        super().__init__(settings, build, spec, CROSS_ATTENTION)
        inputs, width, bias = settings.hidden_size, settings.attention_width, settings.linear_bias
        kernels, parallel = build.kernels, build.parallel
        query_init = settings.query_init or settings.init
        self.query = column_parallel_linear(inputs, width, query_init, kernels, parallel, bias=bias)
        self.key_value = column_parallel_linear(
            inputs, 2 * width, settings.init, kernels, parallel, blocks=(width,) * 2, bias=bias
        )

    def forward(self, hidden: Tensor, memory: Tensor, sequences: Sequences) -> Tensor:
        """Map hidden [b, t, h] and memory [b, s, h] to the shape of hidden."""
        assert sequences.key_ids is not None
        shape, key_shape = map(self.parallel.own_shape, (sequences.ids, sequences.key_ids))
        query = self.query(hidden).view(*shape, self.num_heads, -1)
        key, value = self.key_value(memory).view(*key_shape, 2, self.num_heads, -1).unbind(2)
        return self.output(self.attend(query, key, value, sequences).flatten(2))


class DecoderLayer(TransformerLayer):
    """Causal self-attention, attention to the encoder's output, feed-forward, each with a residual connection."""

    def __init__(self, settings: BlockSettings, build: ModelBuild) -> None:
        super().__init__(settings, build)
        self.cross_attention = CrossAttention(settings, build)
        self.cross_attention_layer_norm = make_norm(settings, build)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        memory: Tensor,
        sequence_ids: Tensor,
        sequence_starts: Tensor,
        memory_ids: Tensor,
        memory_starts: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Map hidden [b, t, h] to the same shape.

        `memory` [b, s, h] is the output of the encoder; memory_ids [b, s] and memory_starts [b, m + 1] are those of its
        rows, sequence_ids [b, t] and sequence_starts those of the decoder's. `bias` [n, t, t] is for self-attention.
        """
        own_norm = self.cross_attention_layer_norm
        hidden, read, _ = self.attend_to_self(hidden, own_norm, sequence_ids, sequence_starts, bias=bias)
        found = self.cross_attention(read, memory, Sequences(sequence_ids, sequence_starts, memory_ids, memory_starts))
        return self.feed_forward(*self.add(found, hidden, CROSS_ATTENTION_OUTPUT, own_norm, self.mlp_layer_norm))
