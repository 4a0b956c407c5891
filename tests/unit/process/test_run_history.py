"""The events of a run."""

from __future__ import annotations

from pathlib import Path

from ctxlm_ds.process.run_history import END, START, append_event, is_completed


def test_a_run_is_completed_when_its_last_start_was(tmp_path: Path) -> None:
    assert not is_completed(tmp_path)
    append_event(tmp_path, START, step=0)
    append_event(tmp_path, END, step=5, completed=False)
    assert not is_completed(tmp_path)
    append_event(tmp_path, START, step=5)
    append_event(tmp_path, END, step=9, completed=True)
    assert is_completed(tmp_path)
    append_event(tmp_path, START, step=9)
    assert not is_completed(tmp_path)
