"""T5 (Raffel 2020) as a list of layers: those of the encoder, then those of the decoder.

Shape letters: b rows, s positions of the encoder, t of the decoder, h width, v vocabulary of this rank.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from ctxlm_ds.families.t5.config import T5Section
from ctxlm_ds.kernels.attention_spec import AttentionSpec
from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.parts.decoder import decoder_block, encoder_block
from ctxlm_ds.models.parts.embeddings import WordTable
from ctxlm_ds.models.parts.relative_bias import relative_bias
from ctxlm_ds.models.parts.transformer import BlockSettings, make_norm
from ctxlm_ds.models.spec import ModelBuild
from ctxlm_ds.parallel.layers import EMBEDDINGS, HiddenDropout
from ctxlm_ds.parallel.parameters import Normal

ENCODER_BIAS, DECODER_BIAS = "encoder_bias", "decoder_bias"
HEAD = "lm_head"


def t5_layers(model: T5Section, build: ModelBuild) -> list[LayerDescription]:
    """List the layers that write decoder_logits [b, t, v] ([b·t, v] under sequence parallelism)."""
    assert model.vocab_size is not None
    words = WordTable(model.vocab_size, model.hidden_size, Normal(model.initializer_factor), build)
    head, scale = words, model.hidden_size**-0.5
    if not model.tied_head:
        # The dense layer of mesh_tensorflow, whose weights begin with this deviation.
        init = Normal(model.initializer_factor * model.hidden_size**-0.5)
        head, scale = WordTable(model.vocab_size, model.hidden_size, init, build, name=HEAD), 1.0
    encoder, decoder = _settings(model, build, causal=False), _settings(model, build, causal=True)
    bias = partial(
        relative_bias, num_heads=model.num_attention_heads, init=encoder.init, build=build,
        buckets=model.relative_buckets, reach=model.relative_reach,
    )  # fmt: skip
    encoder_bias = bias(ENCODER_BIAS, "sequence_ids", causal=False)
    decoder_bias = bias(DECODER_BIAS, "decoder_sequence_ids", causal=True)
    return [
        words.look_up(),
        _dropout("embedding_dropout", model, build),
        *(
            layer
            for number in range(model.num_layers)
            for layer in (encoder_bias, encoder_block(f"encoder.{number}", encoder, build, ENCODER_BIAS))
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
            bias=True, scale=1.0,
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
