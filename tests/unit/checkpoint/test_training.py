"""What a resume needs before it loads anything; tests/integration/test_resume.py resumes runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ctxlm_ds.checkpoint.training import TrainingCheckpoints
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.recipe.schema import RunConfig
from tests.checkpoints import make_config, make_tokenizer, random_weights, write_checkpoint, write_run


def test_a_checkpoint_without_a_state_starts_a_new_run(tmp_path: Path) -> None:
    nothing = cast(Any, SimpleNamespace(topology=None))
    checkpoints = TrainingCheckpoints(nothing, nothing, RunConfig(), tmp_path, {})
    assert checkpoints.resume(None) is None
    with pytest.raises(CheckpointError, match="cannot be resumed; start a new run from its weights"):
        checkpoints.resume(tmp_path)


def test_a_run_begins_with_the_checkpoint_that_was_newest_then(tmp_path: Path) -> None:
    """Every rank, its ledger, and a return to the beginning: the other run saves meanwhile."""
    config = make_config("gpt2", make_tokenizer("gpt2", tmp_path / "tok"))
    weights = random_weights(config)
    write_run(tmp_path / "trunk", config, weights)
    topology = cast(Any, SimpleNamespace(compute_on_rank_0=lambda action: action()))
    config = config.model_copy(update={"initialize_from": str(tmp_path / "trunk")})
    engine = cast(Any, SimpleNamespace(topology=topology))
    checkpoints = TrainingCheckpoints(topology, engine, config, tmp_path, {})
    assert checkpoints.beginning is None and checkpoints.resume(None) is None
    write_checkpoint(tmp_path / "trunk" / "checkpoints" / "step-00000200", config, weights, 200)
    assert checkpoints.resume(None) is None
    assert checkpoints.beginning == tmp_path / "trunk" / "checkpoints" / "step-00000100"
