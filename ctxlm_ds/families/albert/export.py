"""ALBERT as AlbertForPreTraining and AlbertForMaskedLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ctxlm_ds.export.base import ENDS
from ctxlm_ds.export.key_maps import KeyMap, Row, expand
from ctxlm_ds.families.albert.config import AlbertSection
from ctxlm_ds.families.bert.export import MASKED_LM, WITH_SENTENCES, BertExport, block_rows, table_rows

LAYERS = "albert.encoder.albert_layer_groups"
QKV = ("query", "key", "value")
REST = ("attention.dense", "attention.LayerNorm", "ffn", "ffn_output", "full_layer_layer_norm")
TABLES = "albert.embeddings"
ROWS = (
    *table_rows("albert"),
    Row("embeddings.layer_norm.{p}", (f"{TABLES}.LayerNorm.{{p}}",)),
    Row("embedding_projection.{p}", ("albert.encoder.embedding_hidden_mapping_in.{p}",)),
    Row("heads.mlm_transform.{p}", ("predictions.dense.{p}",)),
    Row("heads.mlm_layer_norm.{p}", ("predictions.LayerNorm.{p}",)),
    Row("mlm_bias.bias", ("predictions.bias",)),
)
SENTENCE_ROWS = (
    Row("heads.pooler.{p}", ("albert.pooler.{p}",)),
    Row("heads.nsp_classifier.{p}", ("sop_classifier.classifier.{p}",)),
)
TIED = {
    "predictions.decoder.weight": f"{TABLES}.word_embeddings.weight",
    "predictions.decoder.bias": "predictions.bias",
}
BUFFERS = (r"albert\.embeddings\.(position_ids|token_type_ids)",)
SENTENCE_TENSORS = (r"albert\.pooler\.(weight|bias)", r"sop_classifier\.classifier\.(weight|bias)")


def layer_rows(model: AlbertSection) -> tuple[Row, ...]:
    """List the rows of every layer that has weights."""
    rows: list[Row] = []
    for number in range(model.num_distinct_blocks):
        group, layer = divmod(number, model.layers_per_group)
        theirs, qkv = f"{LAYERS}.{group}.albert_layers.{layer}", (f"attention.{part}" for part in QKV)
        rows += block_rows(f"encoder.{number}", theirs, qkv, REST)
    return expand(rows, 0)


class AlbertExport(BertExport):
    """ALBERT: two classes, one with the sentence-order head."""

    section = AlbertSection
    model_type = "albert"
    config_class = "AlbertConfig"
    hf_classes = {WITH_SENTENCES: "AlbertForPreTraining", MASKED_LM: "AlbertForMaskedLM"}
    settings = BertExport.settings | {
        "embedding_size": "embedding_size",
        "num_groups": "num_hidden_groups",
        "layers_per_group": "inner_group_num",
    }
    title = "ALBERT"
    pair_task = "sentence-order prediction"
    pair_output = "sop_logits"
    sentence_rows = SENTENCE_ROWS
    activations = {**BertExport.activations, "gelu_tanh": "gelu_new"}
    special_ids = ENDS
    plain_settings = {"tie_word_embeddings": True}
    kept_settings = ("classifier_dropout_prob",)

    def key_map(self, model: Any, outputs: Sequence[str], pad_id: int) -> KeyMap:
        self.check(model, outputs)
        with_sentences = "sentence_logits" in outputs
        rows, unused = (ROWS + SENTENCE_ROWS, BUFFERS) if with_sentences else (ROWS, BUFFERS + SENTENCE_TENSORS)
        table = (*expand(rows, 0), *layer_rows(model))
        return KeyMap(self.hf_classes[frozenset(outputs)], table, TIED, unused, optional_prefix="albert.")


EXPORT = AlbertExport()
