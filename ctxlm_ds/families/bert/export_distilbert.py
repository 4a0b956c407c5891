"""DistilBERT as DistilBertForMaskedLM."""

from __future__ import annotations

from collections.abc import Sequence

from ctxlm_ds.export.base import same
from ctxlm_ds.export.key_maps import KeyMap, Row, expand
from ctxlm_ds.families.bert.config import DistilbertSection
from ctxlm_ds.families.bert.export import MASKED_LM, EncoderExport, block_rows

TABLES = "distilbert.embeddings"
ROWS = (
    Row("word_embeddings.weight", (f"{TABLES}.word_embeddings.weight",)),
    Row("embeddings.position_embeddings.weight", (f"{TABLES}.position_embeddings.weight",)),
    Row("embeddings.layer_norm.{p}", (f"{TABLES}.LayerNorm.{{p}}",)),
    *block_rows(
        "encoder.{i}", "distilbert.transformer.layer.{i}", (f"attention.{part}_lin" for part in "qkv"),
        ("attention.out_lin", "sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm"),
    ),
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
