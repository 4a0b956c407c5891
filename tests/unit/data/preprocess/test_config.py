"""The key that is equal for equal builds."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from ctxlm_ds.data.preprocess.config import PreprocessConfig, build_key
from ctxlm_ds.data.sources.types import InputShard

PLAIN = PreprocessConfig()
CHANGES: dict[str, Any] = {
    "json_keys": ("title",), "split_sentences": True, "keep_newlines": True, "leading_space": True, "append_eod": True,
    "prepend_bos": True, "split_special_tokens": True, "input_format": "text", "spans_key": "spans", "join_keys": True,
    "shard": InputShard(1, 3),
}  # fmt: skip
WITHOUT_EFFECT: dict[str, Any] = {"workers": 8, "max_bad_records": 9, "overwrite": True, "document": "file"}


@pytest.mark.parametrize("name", CHANGES)
def test_every_setting_that_decides_bytes_changes_the_key(name: str) -> None:
    assert build_key("s", "t", replace(PLAIN, **{name: CHANGES[name]})) != build_key("s", "t", PLAIN)


def test_other_sources_and_tokenizers_change_the_key_and_workers_do_not() -> None:
    key = build_key("s", "t", PLAIN)
    assert key == build_key("s", "t", replace(PLAIN, **WITHOUT_EFFECT))
    assert len({key, build_key("S", "t", PLAIN), build_key("s", "T", PLAIN)}) == 3
    assert {field.name for field in fields(PLAIN)} == {*CHANGES, *WITHOUT_EFFECT}


def test_the_version_of_the_splitter_counts_for_split_sentences_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    split = replace(PLAIN, split_sentences=True)
    before = build_key("s", "t", PLAIN), build_key("s", "t", split)
    monkeypatch.setattr("ctxlm_ds.data.preprocess.config.SPLITTER_VERSION", -1)
    after = build_key("s", "t", PLAIN), build_key("s", "t", split)
    assert after[0] == before[0] and after[1] != before[1]
