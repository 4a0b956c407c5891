"""state.json of a checkpoint: read as it was written, and every wrong value is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.checkpoint.saved_state import read_saved_state
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.training.loop.state import TrainState

STATE = TrainState(step=7, rows_consumed=224, tokens=9000, recent_losses=[7.5, 7.25]).to_dict()
SOURCE = {"path": "data/a", "documents": [0, 90], "rows": 700, "index": "abcd"}


def write(folder: Path, document: Any) -> Path:
    (folder / "state.json").write_text(json.dumps(document))
    return folder


def test_what_was_written_is_read(tmp_path: Path) -> None:
    data = {"sources": [SOURCE], "tokenizer_fingerprint": "t"}
    found = read_saved_state(write(tmp_path, {"train_state": STATE, "data": data}))
    assert found == {"train_state": STATE, "data": data, "environment": {}}
    assert TrainState.from_dict(found["train_state"]).to_dict() == STATE


def test_imported_weights_have_none(tmp_path: Path) -> None:
    assert read_saved_state(tmp_path) == {}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "expected an object"),
        ({}, r"damaged \(train_state: Field required\)"),
        ({"train_state": {**STATE, "step": "7"}}, r"damaged \(train_state\.step: .*valid integer"),
        ({"train_state": {**STATE, "recent_losses": [1, None]}}, r"train_state\.recent_losses\.1: .*valid number"),
        ({"train_state": {**STATE, "step": -1}}, "impossible count"),
        ({"train_state": {**STATE, "tokens": 10**30}}, "impossible count"),
        ({"train_state": STATE, "data": {"sources": [{**SOURCE, "documents": [0]}]}}, r"data\.sources\.0\.documents"),
        ({"train_state": STATE, "data": {"sources": [{**SOURCE, "rows": 1.5}]}}, r"data\.sources\.0\.rows"),
        ({"train_state": STATE, "environment": []}, r"damaged \(environment: "),
    ],
)
def test_damage_is_named(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"state\.json: .*{message}"):
        read_saved_state(write(tmp_path, document))
