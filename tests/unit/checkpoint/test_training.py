"""What a resume needs before it loads anything; tests/integration/test_resume.py resumes runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ctxlm_ds.checkpoint.training import TrainingCheckpoints
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.recipe.schema import RunConfig


def test_a_checkpoint_without_a_state_starts_a_new_run(tmp_path: Path) -> None:
    nothing = cast(Any, SimpleNamespace(topology=None))
    checkpoints = TrainingCheckpoints(nothing, nothing, RunConfig(), tmp_path, {})
    assert checkpoints.resume(None) is None
    with pytest.raises(CheckpointError, match="cannot be resumed; start a new run from its weights"):
        checkpoints.resume(tmp_path)
