"""How far a run is before it is started: where it resumes, that it is complete, or why it cannot be continued."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, step_name
from ctxlm_ds.checkpoint.manifest import hash_files, write_manifest
from ctxlm_ds.checkpoint.progress import read_progress
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.recipe.load import dump_config
from ctxlm_ds.recipe.schema import RunConfig
from tests.sections import changed_config


def config(**changes: Any) -> RunConfig:
    return changed_config({"training": {"max_steps": 40}}, {name.replace("__", "."): v for name, v in changes.items()})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Checkpoints of the steps 10 and 20, as their files are compared."""
    for step in (10, 20):
        folder = tmp_path / CHECKPOINTS_DIR / step_name(step)
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(dump_config(config(model__vocab_size=300)))
        state = {"step": step, "rows_consumed": 8 * step, "tokens": 100 * step}
        (folder / "state.json").write_text(json.dumps({"train_state": state, "data": {}, "environment": {}}))
        write_manifest(folder, step, hash_files(folder, ["config.yaml", "state.json"]))
    return tmp_path


def test_a_new_run_has_none(tmp_path: Path) -> None:
    assert read_progress(tmp_path / "none", config()) is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "resumes at step 20 of 40"),
        ({"training__max_steps": 2000}, "resumes at step 20 of 2,000"),
        ({"training__max_steps": 20}, "complete already: step 20 of 20"),
        ({"training__max_tokens": 2000}, "complete already: step 20 of 40"),
        ({"training__max_tokens": 2001}, "resumes at step 20 of 40"),
    ],
)
def test_where_a_run_goes_on(run_dir: Path, changes: dict[str, Any], line: str) -> None:
    found = read_progress(run_dir, config(**changes))
    assert found is not None and found.describe() == line


def test_it_goes_on_at_the_newest_that_is_whole(run_dir: Path) -> None:
    (run_dir / CHECKPOINTS_DIR / step_name(20) / "state.json").write_text("{")
    found = read_progress(run_dir, config())
    assert found is not None and found.step == 10


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"training__seed": 9}, "training.seed: 1234 -> 9"),
        ({"model__num_layers": 3}, "model.num_layers: 12 -> 3"),
        ({"model__vocab_size": 400}, "model.vocab_size: 300 -> 400"),
    ],
)
def test_what_cannot_change_is_refused(run_dir: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError, match="step-00000020 cannot be continued") as caught:
        read_progress(run_dir, config(**changes))
    assert word in str(caught.value)


def test_it_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import ctxlm_ds.checkpoint.progress"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
