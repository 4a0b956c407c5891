"""TinyBERT as BertModel, and with a head as BertForMaskedLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ctxlm_ds.export.base import CardText, Fields, TokenIds
from ctxlm_ds.export.key_maps import KeyMap, expand
from ctxlm_ds.families.bert.config import BertSection
from ctxlm_ds.families.bert.export import BUFFERS, MASKED_LM, OLD_ENDINGS, ROWS, BertExport
from ctxlm_ds.families.tinybert.config import LAST_HIDDEN, PROJECTED, TinyBertSection

BERT, SIZE = "bert.", "fit_size"
ENCODER = frozenset({LAST_HIDDEN})
ENCODER_ROWS = tuple(
    replace(row, theirs=tuple(name.removeprefix(BERT) for name in row.theirs))
    for row in ROWS
    if row.theirs[0].startswith(BERT)
)
POOLER = (r"pooler\.dense\.(weight|bias)",)


class TinyBertExport(BertExport):
    """TinyBERT: the encoder alone, or with BERT's masked-LM head."""

    section = TinyBertSection
    hf_classes = {MASKED_LM: "BertForMaskedLM", ENCODER: "BertModel"}
    extra_outputs = frozenset({PROJECTED})
    position_outputs = frozenset({LAST_HIDDEN})
    proof_arguments = {"BertModel": {"add_pooling_layer": False}}

    def claims(self, values: Mapping[str, Any]) -> bool:
        return values.get("model_type") == self.model_type and SIZE in values

    def their_settings(self, model: TinyBertSection, ids: TokenIds) -> dict[str, Any]:
        return super().their_settings(model, ids) | {SIZE: model.fit_size}

    def our_settings(self, config: Any, folder: Path) -> dict[str, Any]:
        return super().our_settings(config, folder) | {SIZE: getattr(config, SIZE)}

    def key_map(self, model: BertSection, outputs: Sequence[str], pad_id: int) -> KeyMap:
        if frozenset(outputs) != ENCODER:
            return super().key_map(model, outputs, pad_id)
        self.check(model, outputs)
        buffers = tuple(pattern.replace(r"bert\.", "") for pattern in BUFFERS)
        return KeyMap("BertModel", expand(ENCODER_ROWS, model.num_layers), {}, buffers + POOLER, OLD_ENDINGS)

    def outputs_in(self, file_names: Sequence[str]) -> tuple[str, ...]:
        has_head = any(name.startswith("cls.") for name in file_names)
        return ("predicted_logits",) if has_head else (LAST_HIDDEN,)

    def their_outputs(self, result: Any, fields: Fields) -> Fields:
        if "last_hidden_state" in result:
            return {LAST_HIDDEN: result.last_hidden_state}
        return super().their_outputs(result, fields)

    def card(self, outputs: Sequence[str], mask_token: str) -> CardText:
        if frozenset(outputs) != ENCODER:
            return super().card(outputs, mask_token)
        usage = (
            'features = pipeline("feature-extraction", model=folder)\n'
            'print(features("The capital of the country is a large city.")[0][0])\n'
        )
        heads = "It has no head and no pooler: it was distilled from a larger encoder, layer by layer, for fine-tuning."
        return CardText("TinyBERT encoder", heads, "feature-extraction", "distillation", usage, "distilled")


EXPORT = TinyBertExport()
