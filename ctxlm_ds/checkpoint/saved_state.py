"""state.json of a checkpoint: the train state, what describes the training rows, and the environment of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ctxlm_ds.checkpoint.manifest import MAX_STEP
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.training.loop.state import TrainState
from ctxlm_ds.untrusted_json import read_json_object

STATE_NAME = "state.json"
SOURCES = "sources"


class _Source(BaseModel):
    """A training source as a checkpoint describes it."""

    model_config = ConfigDict(strict=True)

    path: str
    documents: list[int] = Field(min_length=2, max_length=2)
    rows: int
    index: str


class _Data(BaseModel):
    """What describes the training rows; other facts are compared as they are."""

    sources: list[_Source] = []


class _SavedState(BaseModel):
    model_config = ConfigDict(strict=True)

    train_state: TrainState
    data: _Data = _Data()
    environment: dict[str, Any] = {}


def read_saved_state(folder: Path) -> dict[str, Any]:
    """Read state.json; empty for imported weights, which have none. Raises CheckpointError if it is damaged."""
    path = folder / STATE_NAME
    if not path.exists():
        return {}
    document = read_json_object(path, CheckpointError)
    try:
        state = _SavedState.model_validate_json(json.dumps(document)).train_state
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path}: damaged ({where}: {first['msg']}); use another checkpoint") from None
    if any(not 0 <= number < MAX_STEP for number in (state.step, state.rows_consumed, state.tokens, state.seconds)):
        raise CheckpointError(f"{path}: damaged (train_state has an impossible count); use another checkpoint")
    return {"data": {}, "environment": {}, **document}
