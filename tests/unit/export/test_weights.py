"""Parameters joined from the pieces of a checkpoint: pieces that do not fit together are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.weights import HuggingFaceWeights


def test_parts_of_a_parameter_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    model = BertForMaskedLM(
        BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
    )
    model.bert.encoder.layer[0].attention.self.key = nn.Linear(31, 32)
    model.save_pretrained(tmp_path)
    with pytest.raises(ExportError, match=r"query\.weight, .*key\.weight, .* do not fit together"):
        HuggingFaceWeights(tmp_path)
