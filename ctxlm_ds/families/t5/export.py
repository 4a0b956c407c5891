"""T5 as T5ForConditionalGeneration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import CardText, EncoderDecoderExport, TokenIds, same
from ctxlm_ds.export.key_maps import KeyMap, Row, expand
from ctxlm_ds.families.t5.config import T5Section

WORDS, HEAD = "shared.weight", "lm_head.weight"
SELF, CROSS, MLP = "SelfAttention", "EncDecAttention", "DenseReluDense"
UNUSED = (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",)
"""Written by older versions of transformers, read by none."""
GATE = "gated-"
GATED_NAMES = {"gelu_tanh": "gated-gelu", "gelu": "gated-gelu_python", "relu": "gated-relu"}
"""transformers computes `gated-gelu` with the tanh form (configuration_t5.py)."""


def _stack_rows(stack: str, mlp: int, gated: bool) -> tuple[Row, ...]:
    """Return the rows of a stack whose feed-forward layer is number `mlp` of a block's parts."""
    theirs = f"{stack}.block.{{i}}.layer"
    ups = ("wi_0", "wi_1") if gated else ("wi",)
    return (
        Row(f"{stack}_bias.weight", (f"{stack}.block.0.layer.0.{SELF}.relative_attention_bias.weight",)),
        Row(f"{stack}.{{i}}.attention_layer_norm.weight", (f"{theirs}.0.layer_norm.weight",)),
        Row(f"{stack}.{{i}}.attention.qkv.weight", tuple(f"{theirs}.0.{SELF}.{part}.weight" for part in "qkv")),
        Row(f"{stack}.{{i}}.attention.output.weight", (f"{theirs}.0.{SELF}.o.weight",)),
        Row(f"{stack}.{{i}}.mlp_layer_norm.weight", (f"{theirs}.{mlp}.layer_norm.weight",)),
        Row(f"{stack}.{{i}}.mlp.up.weight", tuple(f"{theirs}.{mlp}.{MLP}.{up}.weight" for up in ups)),
        Row(f"{stack}.{{i}}.mlp.down.weight", (f"{theirs}.{mlp}.{MLP}.wo.weight",)),
        Row(f"{stack}_end.norm.weight", (f"{stack}.final_layer_norm.weight",)),
    )


CROSS_ROWS = (
    Row("decoder.{i}.cross_attention_layer_norm.weight", ("decoder.block.{i}.layer.1.layer_norm.weight",)),
    Row("decoder.{i}.cross_attention.query.weight", (f"decoder.block.{{i}}.layer.1.{CROSS}.q.weight",)),
    Row(
        "decoder.{i}.cross_attention.key_value.weight",
        tuple(f"decoder.block.{{i}}.layer.1.{CROSS}.{part}.weight" for part in "kv"),
    ),
    Row("decoder.{i}.cross_attention.output.weight", (f"decoder.block.{{i}}.layer.1.{CROSS}.o.weight",)),
)


class T5Export(EncoderDecoderExport):
    """T5 and T5 1.1."""

    section = T5Section
    model_type = "t5"
    config_class = "T5Config"
    hf_classes = {frozenset({"decoder_logits"}): "T5ForConditionalGeneration"}
    settings = {
        **same("vocab_size", "num_layers", "num_decoder_layers", "initializer_factor"),
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "head_size": "d_kv",
        "intermediate_size": "d_ff",
        "relative_buckets": "relative_attention_num_buckets",
        "relative_reach": "relative_attention_max_distance",
        "layer_norm_eps": "layer_norm_epsilon",
        "hidden_dropout": "dropout_rate",
    }
    activation_key = "feed_forward_proj"
    activations = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
    special_ids = {"eos_token_id": "sep_id", "decoder_start_token_id": "pad_id"}
    plain_settings = {"is_encoder_decoder": True}
    kept_settings = ("classifier_dropout",)
    next_token_output = "decoder_logits"

    def key_map(self, model: T5Section, outputs: Sequence[str], pad_id: int) -> KeyMap:
        self.check(model, outputs)
        rows = [
            Row("word_embeddings.weight", (WORDS,)),
            *expand(_stack_rows("encoder", 1, model.gated), model.num_layers),
            *expand((*_stack_rows("decoder", 2, model.gated), *CROSS_ROWS), model.num_decoder_layers),
        ]
        tied = {f"{stack}.embed_tokens.weight": WORDS for stack in ("encoder", "decoder")}
        if model.tied_head:
            tied[HEAD] = WORDS
        else:
            rows.append(Row("lm_head.weight", (HEAD,)))
        return KeyMap("T5ForConditionalGeneration", tuple(rows), tied, UNUSED, body=("shared.", "encoder.", "decoder."))

    def their_settings(self, model: T5Section, ids: TokenIds) -> dict[str, Any]:
        names = GATED_NAMES if model.gated else self.activations
        return super().their_settings(model, ids) | {
            self.activation_key: names[model.hidden_activation],
            **self.written_settings(model),
        }

    def written_settings(self, model: T5Section) -> dict[str, Any]:
        # transformers 5 takes it for scale_decoder_outputs and then sets it to true; older versions tie the head by it.
        settings = {"tie_word_embeddings": model.tied_head}
        # Its cache for generate() has as many layers as the encoder.
        return settings if model.num_decoder_layers <= model.num_layers else settings | {"use_cache": False}

    def our_settings(self, config: Any, folder: Path) -> dict[str, Any]:
        projection = str(getattr(config, self.activation_key))
        names = GATED_NAMES if projection.startswith(GATE) else self.activations
        known = {theirs: ours for ours, theirs in names.items()}
        if projection not in known:
            choices = ", ".join((*self.activations.values(), *GATED_NAMES.values()))
            raise ExportError(f"{folder}/config.json: {self.activation_key} {projection!r} is not one of {choices}")
        start = getattr(config, "decoder_start_token_id", None)
        if start not in (None, self.pad_id(config)):
            raise ExportError(
                f"{folder}/config.json: decoder_start_token_id is {start}; only models whose decoder starts with "
                f"pad_token_id {self.pad_id(config)} can be imported"
            )
        scaled = getattr(config, "scale_decoder_outputs", getattr(config, "tie_word_embeddings", True))
        return {ours: getattr(config, theirs) for ours, theirs in self.settings.items()} | {
            "family": "t5",
            "hidden_activation": known[projection],
            "gated": projection.startswith(GATE),
            "tied_head": bool(scaled),
            "attention_dropout": config.dropout_rate,
        }

    def card(self, outputs: Sequence[str], mask_token: str) -> CardText:
        text = 'text = "The capital of"  # with sentinels or a mode token if the inputs of its objective have them\n'
        card = self.write_card("T5 encoder-decoder", "text")
        return replace(card, usage=text + card.usage)


EXPORT = T5Export()
