"""BART and mBART as their classes for conditional generation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import ENDS, CardText, EncoderDecoderExport, TokenIds, same
from ctxlm_ds.export.key_maps import KeyMap, Row, expand
from ctxlm_ds.families.bart.config import BartSection, MBartSection
from ctxlm_ds.families.bert.export import block_rows

PREFIX = "model."
WORDS = f"{PREFIX}shared.weight"
LOGITS_BIAS = r"(model\.)?final_logits_bias"
UNUSED = (r"model\.(encoder|decoder)\.version",)


def _stack_rows(stack: str, embeddings: str) -> tuple[Row, ...]:
    qkv = (f"self_attn.{part}_proj" for part in "qkv")
    rest = ("self_attn.out_proj", "self_attn_layer_norm", "fc1", "fc2", "final_layer_norm")
    return (
        Row(f"{embeddings}.position_embeddings.weight", (f"{PREFIX}{stack}.embed_positions.weight",)),
        Row(f"{embeddings}.layer_norm.{{p}}", (f"{PREFIX}{stack}.layernorm_embedding.{{p}}",)),
        *block_rows(f"{stack}.{{i}}", f"{PREFIX}{stack}.layers.{{i}}", qkv, rest),
    )


CROSS = f"{PREFIX}decoder.layers.{{i}}.encoder_attn"
CROSS_ROWS = (
    Row("decoder.{i}.cross_attention.query.{p}", (f"{CROSS}.q_proj.{{p}}",)),
    Row("decoder.{i}.cross_attention.key_value.{p}", tuple(f"{CROSS}.{part}_proj.{{p}}" for part in "kv")),
    Row("decoder.{i}.cross_attention.output.{p}", (f"{CROSS}.out_proj.{{p}}",)),
    Row("decoder.{i}.cross_attention_layer_norm.{p}", (f"{CROSS}_layer_norm.{{p}}",)),
)
FINAL_ROWS = tuple(
    Row(f"{stack}_layer_norm.{{p}}", (f"{PREFIX}{stack}.layer_norm.{{p}}",)) for stack in ("encoder", "decoder")
)
"""Norms after the stacks of mBART."""
TIED = {name: WORDS for name in (*(f"{PREFIX}{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")),
                                 "lm_head.weight")}  # fmt: skip


class BartExport(EncoderDecoderExport):
    """BART."""

    section = BartSection
    model_type = "bart"
    config_class = "BartConfig"
    hf_classes = {frozenset({"decoder_logits"}): "BartForConditionalGeneration"}
    settings = {
        **same("vocab_size", "max_position_embeddings", "attention_dropout", "activation_dropout", "scale_embedding"),
        "hidden_size": "d_model",
        "num_layers": "encoder_layers",
        "num_decoder_layers": "decoder_layers",
        "num_attention_heads": "encoder_attention_heads",
        "intermediate_size": "encoder_ffn_dim",
        "hidden_dropout": "dropout",
        "initializer_range": "init_std",
    }
    activation_key = "activation_function"
    special_ids = {**ENDS, "forced_eos_token_id": "sep_id"}
    default_pad_id = 1
    plain_settings = {"is_encoder_decoder": True, "is_decoder": False, "tie_word_embeddings": True}
    kept_settings = (
        "classifier_dropout", "encoder_layerdrop", "decoder_layerdrop", "decoder_start_token_id", "forced_eos_token_id",
        "forced_bos_token_id",
    )  # fmt: skip
    fixed_norm_eps = 1e-5
    next_token_output = "decoder_logits"
    title: ClassVar[str] = "BART"

    def key_map(self, model: BartSection, outputs: Sequence[str], pad_id: int) -> KeyMap:
        self.check(model, outputs)
        rows = (
            Row("word_embeddings.weight", (WORDS,)),
            *expand(_stack_rows("encoder", "embeddings"), model.num_layers),
            *expand((*_stack_rows("decoder", "decoder_embeddings"), *CROSS_ROWS), model.num_decoder_layers),
            *(expand(FINAL_ROWS, 0) if model.pre_layer_norm else ()),
        )
        (hf_class,) = self.hf_classes.values()
        return KeyMap(hf_class, rows, TIED, UNUSED, optional_prefix=PREFIX, zero=(LOGITS_BIAS,))

    def start_id(self, ids: TokenIds) -> int:
        return ids.sep_id

    def their_settings(self, model: BartSection, ids: TokenIds) -> dict[str, Any]:
        return super().their_settings(model, ids) | {
            "decoder_attention_heads": model.num_attention_heads,
            "decoder_ffn_dim": model.intermediate_size,
            "decoder_start_token_id": self.start_id(ids),
        }

    def our_settings(self, config: Any, folder: Path) -> dict[str, Any]:
        for setting in ("attention_heads", "ffn_dim"):
            encoder = getattr(config, f"encoder_{setting}")
            decoder = getattr(config, f"decoder_{setting}", encoder)
            if encoder != decoder:
                raise ExportError(
                    f"{folder}/config.json: decoder_{setting} {decoder} is not encoder_{setting} {encoder}; only "
                    "models whose stacks have the same can be imported"
                )
        return super().our_settings(config, folder) | {"layer_norm_eps": self.fixed_norm_eps}

    def card(self, outputs: Sequence[str], mask_token: str) -> CardText:
        text = f'"The capital of {mask_token or "the country"} is"'
        return self.write_card(f"{self.title} encoder-decoder", text)


EXPORT = BartExport()


class MBartExport(BartExport):
    """mBART; its decoder starts with a token of the language, so the class names no start token."""

    section = MBartSection
    model_type = "mbart"
    config_class = "MBartConfig"
    hf_classes = {frozenset({"decoder_logits"}): "MBartForConditionalGeneration"}
    title = "mBART"

    def their_settings(self, model: BartSection, ids: TokenIds) -> dict[str, Any]:
        return super().their_settings(model, ids) | {"decoder_start_token_id": None}


MBART_EXPORT = MBartExport()
