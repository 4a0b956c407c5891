"""DistilBERT as DistilBertForMaskedLM."""

from __future__ import annotations

from collections.abc import Sequence

from ctxlm_ds.export.base import same
from ctxlm_ds.export.key_maps import KeyMap, Row, expand
from ctxlm_ds.families.bert.config import DistilbertSection
from ctxlm_ds.families.bert.export import MASKED_LM, EncoderExport

LAYER = "distilbert.transformer.layer.{i}"
TABLES = "distilbert.embeddings"
ROWS = (
    Row("word_embeddings.weight", (f"{TABLES}.word_embeddings.weight",)),
    Row("embeddings.position_embeddings.weight", (f"{TABLES}.position_embeddings.weight",)),
    Row("embeddings.layer_norm.{p}", (f"{TABLES}.LayerNorm.{{p}}",)),
    Row("encoder.{i}.attention.qkv.{p}",
        tuple(f"{LAYER}.attention.{part}.{{p}}" for part in ("q_lin", "k_lin", "v_lin"))),
    Row("encoder.{i}.attention.output.{p}", (f"{LAYER}.attention.out_lin.{{p}}",)),
    Row("encoder.{i}.attention_layer_norm.{p}", (f"{LAYER}.sa_layer_norm.{{p}}",)),
    Row("encoder.{i}.mlp.up.{p}", (f"{LAYER}.ffn.lin1.{{p}}",)),
    Row("encoder.{i}.mlp.down.{p}", (f"{LAYER}.ffn.lin2.{{p}}",)),
    Row("encoder.{i}.mlp_layer_norm.{p}", (f"{LAYER}.output_layer_norm.{{p}}",)),
    Row("heads.mlm_transform.{p}", ("vocab_transform.{p}",)),
    Row("heads.mlm_layer_norm.{p}", ("vocab_layer_norm.{p}",)),
    Row("mlm_bias.bias", ("vocab_projector.bias",)),
)  # fmt: skip
TIED = {"vocab_projector.weight": f"{TABLES}.word_embeddings.weight"}
BUFFERS = (r"distilbert\.embeddings\.position_ids",)


class DistilbertExport(EncoderExport):
    """DistilBERT."""

    section = DistilbertSection
    title = "DistilBERT"
    model_type = "distilbert"
    config_class = "DistilBertConfig"
    hf_classes = {MASKED_LM: "DistilBertForMaskedLM"}
    settings = {
        **same("vocab_size", "max_position_embeddings", "attention_dropout", "initializer_range"),
        "hidden_size": "dim",
        "num_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_dropout": "dropout",
    }
    activation_key = "activation"
    plain_settings = {"tie_word_embeddings": True}
    fixed_norm_eps = 1e-12

    def key_map(self, model: DistilbertSection, outputs: Sequence[str], pad_id: int) -> KeyMap:
        self.check(model, outputs)
        rows = expand(ROWS, model.num_layers)
        return KeyMap("DistilBertForMaskedLM", rows, TIED, BUFFERS, optional_prefix="distilbert.")


EXPORT = DistilbertExport()
