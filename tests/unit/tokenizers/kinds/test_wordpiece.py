"""BERT's WordPiece: case, and the merge score on record."""

from __future__ import annotations

import json
from pathlib import Path

from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.unit.tokenizers.conftest import TEXTS


def test_merge_score_and_settings_are_recorded(tmp_path: Path) -> None:
    train_tokenizer("wordpiece", TEXTS, 500, tmp_path / "t", lowercase=False)
    record = json.loads((tmp_path / "t" / "ctxlm_tokenizer.json").read_text())
    assert record["merge_score"] == "frequency"
    assert record["lowercase"] is False
    assert record["fingerprint"] == load_tokenizer(tmp_path / "t").fingerprint
