"""tools/show_batch.py: what it says of runs without bad batches, of folders that are none, of wrong options."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.apps.text.indexed_dataset import batch
from ctxlm_ds.process.run_history import END, SKIP, append_event
from tests.integration.route import call_here


def call(*words: object) -> tuple[int, str, str]:
    """Exit status, stdout, stderr."""
    done = call_here(batch, "show_batch.py", *words)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    append_event(tmp_path / "run", END, step=20, reason="r", completed=True, failed=False)
    return tmp_path / "run"


def skip(run_dir: Path, step: int) -> None:
    append_event(run_dir, SKIP, step=step, why="too high", rows={"first": 8 * step, "count": 8, "sources": []})


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    status, out, error = call(tmp_path / "none")
    assert (status, out) == (2, "") and f"error: {tmp_path / 'none'}: no such folder" in error
    for words in ((), ("--step", 3), ("--first-row", 0)):
        status, out, error = call(tmp_path, *words)
        assert (status, out) == (2, "") and f"error: {tmp_path} is no run" in error


def test_a_run_without_bad_batches_says_so(run_dir: Path) -> None:
    assert call(run_dir) == (0, f"no bad batch is on record in {run_dir}\n", "")
    status, out, error = call(run_dir, "--step", 3)
    assert (status, out) == (2, "") and "no bad batch of step 3; no other step has one either" in error


def test_bad_batches_are_listed_and_named(run_dir: Path) -> None:
    for step in (4, 9, 9):
        skip(run_dir, step)
    status, out, error = call(run_dir)
    assert (status, error) == (0, "") and out.splitlines()[0] == "skip step 4, rows 32 to 39: too high"
    assert "no bad batch of step 3; recorded steps: 4, 9\n" in call(run_dir, "--step", 3)[2]


def test_options_that_would_be_ignored_are_refused(run_dir: Path) -> None:
    status, _, error = call(run_dir, "--first-row", 5, "--step", 3)
    assert status == 2 and "argument --step: not allowed with argument --first-row" in error
    status, _, error = call(run_dir, "--count", 3)
    assert status == 2 and "--count goes with --step or --first-row" in error
