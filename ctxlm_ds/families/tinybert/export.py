"""TinyBERT as BertModel, and with a head as BertForMaskedLM or BertForSequenceClassification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ctxlm_ds.export.base import CardText, Fields, TokenIds
from ctxlm_ds.export.key_maps import KeyMap, Row, expand
from ctxlm_ds.families.bert.config import BertSection
from ctxlm_ds.families.bert.export import BUFFERS, MASKED_LM, OLD_ENDINGS, ROWS, BertExport
from ctxlm_ds.families.tinybert.config import CLASSES, LAST_HIDDEN, PROJECTED, TinyBertSection

BERT, SIZE = "bert.", "fit_size"
ENCODER = frozenset({LAST_HIDDEN})
ENCODER_ROWS = tuple(
    replace(row, theirs=tuple(name.removeprefix(BERT) for name in row.theirs))
    for row in ROWS
    if row.theirs[0].startswith(BERT)
)
TASK = frozenset({CLASSES})
TASK_ROWS = (
    *(row for row in ROWS if row.theirs[0].startswith(BERT)),
    Row("classifier_head.pooler.{p}", ("bert.pooler.dense.{p}",)),
    Row("classifier_head.classifier.{p}", ("classifier.{p}",)),
)
POOLER = (r"pooler\.dense\.(weight|bias)",)


class TinyBertExport(BertExport):
    """TinyBERT: the encoder alone, or with BERT's masked-LM head, or with the classifier of a task."""

    section = TinyBertSection
    hf_classes = {MASKED_LM: "BertForMaskedLM", ENCODER: "BertModel", TASK: "BertForSequenceClassification"}
    extra_outputs = frozenset({PROJECTED})
    position_outputs = frozenset({LAST_HIDDEN})
    proof_arguments = {"BertModel": {"add_pooling_layer": False}}

    def claims(self, values: Mapping[str, Any]) -> bool:
        declared = values.get("architectures") == [self.hf_classes[TASK]]
        return values.get("model_type") == self.model_type and (declared or SIZE in values)

    def shared_outputs(self, outputs: Sequence[str]) -> tuple[str, ...]:
        return (CLASSES,) if CLASSES in outputs else super().shared_outputs(outputs)

    def their_settings(self, model: TinyBertSection, ids: TokenIds) -> dict[str, Any]:
        return super().their_settings(model, ids) | {SIZE: model.fit_size, "num_labels": model.num_classes}

    def our_settings(self, config: Any, folder: Path) -> dict[str, Any]:
        fields = self.section.model_fields
        labels = getattr(config, "id2label", None)
        return super().our_settings(config, folder) | {
            SIZE: getattr(config, SIZE, fields[SIZE].default),
            "num_classes": len(labels) if labels else fields["num_classes"].default,
        }

    def key_map(self, model: BertSection, outputs: Sequence[str], pad_id: int) -> KeyMap:
        if frozenset(outputs) == MASKED_LM:
            return super().key_map(model, outputs, pad_id)
        self.check(model, outputs)
        if frozenset(outputs) == TASK:
            rows = expand(TASK_ROWS, model.num_layers)
            return KeyMap(self.hf_classes[TASK], rows, {}, BUFFERS, OLD_ENDINGS)
        buffers = tuple(pattern.replace(r"bert\.", "") for pattern in BUFFERS)
        return KeyMap("BertModel", expand(ENCODER_ROWS, model.num_layers), {}, buffers + POOLER, OLD_ENDINGS)

    def outputs_in(self, file_names: Sequence[str]) -> tuple[str, ...]:
        if "classifier.weight" in file_names:
            return (CLASSES,)
        has_head = any(name.startswith("cls.") for name in file_names)
        return ("predicted_logits",) if has_head else (LAST_HIDDEN,)

    def their_outputs(self, result: Any, fields: Fields) -> Fields:
        if "last_hidden_state" in result:
            return {LAST_HIDDEN: result.last_hidden_state}
        if result.logits.dim() == 2:
            return {CLASSES: result.logits[:, None]}
        return super().their_outputs(result, fields)

    def card(self, outputs: Sequence[str], mask_token: str) -> CardText:
        if frozenset(outputs) == TASK:
            usage = 'classify = pipeline("text-classification", model=folder)\nprint(classify("What a fine day!"))\n'
            heads = "Its classifier learnt the predictions of a larger model that was fine-tuned for a task."
            return CardText("TinyBERT classifier", heads, "text-classification", "distillation", usage, "distilled")
        if frozenset(outputs) != ENCODER:
            return super().card(outputs, mask_token)
        usage = (
            'features = pipeline("feature-extraction", model=folder)\n'
            'print(features("The capital of the country is a large city.")[0][0])\n'
        )
        heads = "It has no head and no pooler: it was distilled from a larger encoder, layer by layer, for fine-tuning."
        return CardText("TinyBERT encoder", heads, "feature-extraction", "distillation", usage, "distilled")


EXPORT = TinyBertExport()
