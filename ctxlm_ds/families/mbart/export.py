"""mBART as MBartForConditionalGeneration, which has BART's tensors and a norm after each stack."""

from __future__ import annotations

from typing import Any

from ctxlm_ds.export.base import TokenIds
from ctxlm_ds.families.bart.config import BartSection
from ctxlm_ds.families.bart.export import BartExport
from ctxlm_ds.families.mbart.config import MBartSection


class MBartExport(BartExport):
    """mBART; its decoder starts with a token of the language, so the class names no start token."""

    section = MBartSection
    model_type = "mbart"
    config_class = "MBartConfig"
    hf_classes = {frozenset({"decoder_logits"}): "MBartForConditionalGeneration"}
    title = "mBART"

    def their_settings(self, model: BartSection, ids: TokenIds) -> dict[str, Any]:
        return super().their_settings(model, ids) | {"decoder_start_token_id": None}


EXPORT = MBartExport()
