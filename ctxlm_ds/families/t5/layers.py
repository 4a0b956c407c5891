"""T5 (Raffel 2020) as a list of layers: those of the encoder, then those of the decoder.

Shape letters: b rows, s positions of the encoder, t of the decoder, h width, v vocabulary of this rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctxlm_ds.families.t5.config import T5Section
from ctxlm_ds.kernels.attention_spec import AttentionSpec, reads_distances
from ctxlm_ds.models.layers import LayerDescription, ModelBuild
from ctxlm_ds.models.parts.decoder import decoder_block
from ctxlm_ds.models.parts.embeddings import WordTable
from ctxlm_ds.models.parts.transformer import BlockSettings, make_norm, transformer_block
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.layers import EMBEDDINGS, HiddenDropout, declare_split
from ctxlm_ds.parallel.parameters import Init, Normal, ParameterFacts
from ctxlm_ds.parallel.placement import COLUMNS

ENCODER_BIAS, DECODER_BIAS = "encoder_bias", "decoder_bias"
HEAD = "lm_head"


class RelativeBias(nn.Module):
    """A learnt number for each bucket of distances and each head; each rank holds those of its heads."""

    def __init__(
        self,
        num_heads: int,
        init: Init,
        parallel: ParallelContext,
        buckets: int,
        reach: int,
        causal: bool,
        square: bool = True,
    ) -> None:
        """Allocate the numbers for heads of all ranks; all distances from `reach` on share a bucket.

        With `causal` no key is after its query, so all buckets are of distances before it. `square`: return the bias of
        all pairs of positions instead of all distances.
        """
        super().__init__()
        self.buckets, self.reach, self.causal = buckets, reach, causal
        self.parallel, self.square = parallel, square
        self.weight = nn.Parameter(torch.empty(buckets, num_heads // parallel.size))
        declare_split(self, parallel, weight=ParameterFacts(init, decays=False, split=COLUMNS))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the bias [n, s, s] or [n, 2 s - 1] for complete rows of ids [b, s].

        It is that of this rank's heads inside attention.
        """
        length = ids.shape[1]
        places = torch.arange(length, device=ids.device)
        distances = places - places[:, None] if self.square else torch.arange(1 - length, length, device=ids.device)
        weight = self.weight.chunk(self.parallel.context_size, dim=1)[self.parallel.context_rank]
        found = F.embedding(distance_buckets(distances, self.buckets, self.reach, self.causal), weight)
        return found.movedim(-1, 0).contiguous()


def distance_buckets(distances: Tensor, buckets: int, reach: int, causal: bool) -> Tensor:
    """Map distances, place of the key minus that of the query, to buckets from 0.

    Half of the buckets are of keys after the query unless `causal`. Half of those of one direction are of one distance
    each, the others grow by a constant factor up to `reach` (mesh_tensorflow transformer_layers.py,
    `_relative_position_bucket`).
    """
    if causal:
        first, away = torch.zeros_like(distances), (-distances).clamp_min(0)
    else:
        buckets //= 2
        first, away = (distances > 0).long() * buckets, distances.abs()
    exact = buckets // 2
    # fp32 as the original: a distance at the border of two buckets depends on the rounding.
    grown = torch.log(away.float() / exact) / math.log(reach / exact) * (buckets - exact)
    far = (exact + grown.clamp_min(0.0).long()).clamp_max(buckets - 1)
    return first + torch.where(away < exact, away, far)


def t5_layers(model: T5Section, build: ModelBuild) -> list[LayerDescription]:
    """List the layers that write decoder_logits [b, t, v] ([b·t, v] under sequence parallelism)."""
    words = WordTable(model.vocab_size, model.hidden_size, Normal(model.initializer_factor), build)
    head, scale = words, model.hidden_size**-0.5
    if not model.tied_head:
        # The dense layer of mesh_tensorflow, whose weights begin with this deviation.
        init = Normal(model.initializer_factor * model.hidden_size**-0.5)
        head, scale = WordTable(model.vocab_size, model.hidden_size, init, build, name=HEAD), 1.0
    encoder, decoder = _settings(model, build, causal=False), _settings(model, build, causal=True)
    encoder_bias = _bias(ENCODER_BIAS, "sequence_ids", model, encoder, build)
    decoder_bias = _bias(DECODER_BIAS, "decoder_sequence_ids", model, decoder, build)
    return [
        words.look_up(),
        _dropout("embedding_dropout", model, build),
        *(
            layer
            for number in range(model.num_layers)
            for layer in (encoder_bias, transformer_block(f"encoder.{number}", encoder, build, ENCODER_BIAS))
        ),
        _end("encoder_end", "memory", encoder, build, 1.0),
        words.look_up("decoder_input_ids"),
        _dropout("decoder_embedding_dropout", model, build),
        *(
            layer
            for number in range(model.num_decoder_layers)
            for layer in (decoder_bias, decoder_block(f"decoder.{number}", decoder, build, DECODER_BIAS))
        ),
        _end("decoder_end", "hidden", decoder, build, scale),
        head.decode("hidden", "decoder_logits", split_tokens=build.parallel.splits_tokens),
    ]


def _settings(model: T5Section, build: ModelBuild, causal: bool) -> BlockSettings:
    """Return the settings of a stack; initial deviations are those of mesh_tensorflow and of transformers."""
    factor, width = model.initializer_factor, model.hidden_size
    return BlockSettings(
        hidden_size=width,
        num_heads=model.num_attention_heads,
        intermediate_size=model.intermediate_size,
        activation=model.hidden_activation,
        norm_eps=model.layer_norm_eps,
        hidden_dropout=model.hidden_dropout,
        attention=AttentionSpec(
            head_size=model.head_size, causal=causal, dropout=model.attention_dropout, shares_rows=build.shares_rows,
            bias=True, by_distance=True, scale=1.0,
        ),
        pre_layer_norm=True,
        init=Normal(factor * width**-0.5),
        query_init=Normal(factor * (width * model.head_size) ** -0.5),
        residual_init=Normal(factor * (model.num_attention_heads * model.head_size) ** -0.5),
        mlp_output_init=Normal(factor * model.intermediate_size**-0.5),
        linear_bias=False,
        gated=model.gated,
        rms_norm=True,
        inner_dropout=model.hidden_dropout,
    )  # fmt: skip


def _bias(name: str, ids: str, model: T5Section, settings: BlockSettings, build: ModelBuild) -> LayerDescription:
    """Describe the layer before each block of a stack that writes the bias `name`; the stack's blocks share it."""
    square = not reads_distances(settings.attention, build.kernels.attention(settings.attention))
    kwargs = {
        "num_heads": settings.num_heads, "init": settings.init, "parallel": build.parallel,
        "buckets": model.relative_buckets, "reach": model.relative_reach, "causal": settings.attention.causal,
        "square": square,
    }  # fmt: skip
    return LayerDescription(name, RelativeBias, (ids,), (name,), kwargs, tie_key=name, once=True)


def _dropout(name: str, model: T5Section, build: ModelBuild) -> LayerDescription:
    kwargs = {"p": model.hidden_dropout, "kernels": build.kernels, "parallel": build.parallel}
    return LayerDescription(name, HiddenDropout, ("hidden",), ("hidden",), kwargs, call_kwargs={"place": EMBEDDINGS})


def _end(name: str, writes: str, settings: BlockSettings, build: ModelBuild, scale: float) -> LayerDescription:
    kwargs = {"settings": settings, "build": build, "scale": scale}
    return LayerDescription(name, StackEnd, ("hidden",), (writes,), kwargs)


class StackEnd(nn.Module):
    """RMSNorm and dropout after the last layer of a stack, and a factor."""

    def __init__(self, settings: BlockSettings, build: ModelBuild, scale: float) -> None:
        super().__init__()
        self.norm = make_norm(settings, build)
        self.dropout = HiddenDropout(settings.hidden_dropout, build.kernels, build.parallel)
        self.scale = scale

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden to the same shape."""
        hidden = self.dropout(self.norm(hidden), EMBEDDINGS)
        return hidden if self.scale == 1.0 else hidden * self.scale
