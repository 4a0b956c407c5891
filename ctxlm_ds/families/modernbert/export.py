"""ModernBERT as ModernBertForMaskedLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import COMMON_SETTINGS, ENDS, TokenIds, same
from ctxlm_ds.export.key_maps import KeyMap, Row, expand
from ctxlm_ds.families.bert.export import MASKED_LM, EncoderExport
from ctxlm_ds.families.modernbert.config import ModernBertSection

WORDS = "model.embeddings.tok_embeddings.weight"
FIRST_NORM = "encoder.0.attention_layer_norm.weight"
ROWS = (
    Row("word_embeddings.weight", (WORDS,)),
    Row("embedding_layer_norm.weight", ("model.embeddings.norm.weight",)),
    Row("encoder.{i}.attention_layer_norm.weight", ("model.layers.{i}.attn_norm.weight",)),
    Row("encoder.{i}.attention.qkv.weight", ("model.layers.{i}.attn.Wqkv.weight",)),
    Row("encoder.{i}.attention.output.weight", ("model.layers.{i}.attn.Wo.weight",)),
    Row("encoder.{i}.mlp_layer_norm.weight", ("model.layers.{i}.mlp_norm.weight",)),
    Row("encoder.{i}.mlp.up.weight", ("model.layers.{i}.mlp.Wi.weight",)),
    Row("encoder.{i}.mlp.down.weight", ("model.layers.{i}.mlp.Wo.weight",)),
    Row("final_layer_norm.weight", ("model.final_norm.weight",)),
    Row("heads.mlm_transform.weight", ("head.dense.weight",)),
    Row("heads.mlm_layer_norm.weight", ("head.norm.weight",)),
    Row("mlm_bias.bias", ("decoder.bias",)),
)
GLOBAL, LOCAL = "full_attention", "sliding_attention"
"""Their names of the kinds of layers."""


class ModernBertExport(EncoderExport):
    """ModernBERT; attention_dropout there is dropout of the probabilities and of the output."""

    section = ModernBertSection
    title = "ModernBERT"
    model_type = "modernbert"
    config_class = "ModernBertConfig"
    hf_classes = {MASKED_LM: "ModernBertForMaskedLM"}
    extra_outputs = frozenset()
    settings = COMMON_SETTINGS | same("attention_dropout", "local_attention") | {"layer_norm_eps": "norm_eps"}
    activation_key = "hidden_activation"
    special_ids = {**ENDS, "cls_token_id": "cls_id", "sep_token_id": "sep_id"}
    plain_settings = {
        **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias", "sparse_prediction"), False),
        **dict.fromkeys(("decoder_bias", "tie_word_embeddings"), True),
        **dict.fromkeys(("embedding_dropout", "mlp_dropout"), 0.0),
        "initializer_cutoff_factor": 2.0,
    }
    kept_settings = ("classifier_pooling", "classifier_dropout")

    def key_map(self, model: ModernBertSection, outputs: Sequence[str], pad_id: int) -> KeyMap:
        self.check(model, outputs)
        rows = tuple(row for row in expand(ROWS, model.num_layers) if row.ours != FIRST_NORM)
        return KeyMap("ModernBertForMaskedLM", rows, {"decoder.weight": WORDS}, optional_prefix="model.")

    def their_settings(self, model: ModernBertSection, ids: TokenIds) -> dict[str, Any]:
        bases = {GLOBAL: model.global_rotary_base, LOCAL: model.local_rotary_base}
        return super().their_settings(model, ids) | {
            "classifier_activation": self.activations[model.hidden_activation],
            "layer_types": _layer_types(model.num_layers, model.global_attention_every),
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        }

    def our_settings(self, config: Any, folder: Path) -> dict[str, Any]:
        if config.classifier_activation != config.hidden_activation:
            raise ExportError(
                f"{folder}/config.json: classifier_activation is {config.classifier_activation!r} and "
                f"hidden_activation {config.hidden_activation!r}; only models with one activation can be imported"
            )
        return super().our_settings(config, folder) | {
            "hidden_dropout": config.attention_dropout,
            "global_attention_every": _global_attention_every(config.layer_types, folder),
            "global_rotary_base": _rotary_base(config, GLOBAL, folder),
            "local_rotary_base": _rotary_base(config, LOCAL, folder),
        }


def _layer_types(num_layers: int, every: int) -> list[str]:
    return [LOCAL if layer % every else GLOBAL for layer in range(num_layers)]


def _global_attention_every(layer_types: Sequence[str], folder: Path) -> int:
    """Return the distance of global layers; raise ExportError if they are not at equal distances from layer 0."""
    found = list(layer_types)
    for distance in range(1, len(found) + 1):
        if _layer_types(len(found), distance) == found:
            return distance
    raise ExportError(
        f"{folder}/config.json: layer_types has no {GLOBAL} at layer 0 and equal distances after it: {', '.join(found)}"
    )


def _rotary_base(config: Any, kind: str, folder: Path) -> float:
    values = config.rope_parameters[kind]
    if values["rope_type"] != "default":
        raise ExportError(
            f"{folder}/config.json: rope_parameters of {kind} have rope_type {values['rope_type']!r}; only 'default' "
            "can be imported"
        )
    return float(values["rope_theta"])


EXPORT = ModernBertExport()
