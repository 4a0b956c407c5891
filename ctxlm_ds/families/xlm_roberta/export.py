"""XLM-R as XLMRobertaForMaskedLM, whose tensors have RoBERTa's names."""

from __future__ import annotations

from ctxlm_ds.families.bert.export import MASKED_LM
from ctxlm_ds.families.roberta.export import RobertaExport
from ctxlm_ds.families.xlm_roberta.config import XlmRobertaSection


class XlmRobertaExport(RobertaExport):
    """XLM-R."""

    section = XlmRobertaSection
    model_type = "xlm-roberta"
    config_class = "XLMRobertaConfig"
    hf_classes = {MASKED_LM: "XLMRobertaForMaskedLM"}
    title = "XLM-R"


EXPORT = XlmRobertaExport()
