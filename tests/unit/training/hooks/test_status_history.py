"""The starts and ends of a run are events of its history."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.apps.cluster.slurm_commands import Job, named
from ctxlm_ds.process.launch import RankInfo
from ctxlm_ds.process.run_files import read_status
from ctxlm_ds.process.run_history import read_history
from ctxlm_ds.process.run_lock import this_process
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.training.hooks.hooks import Hook, RunEnd, RunStart, StepMetrics
from ctxlm_ds.training.hooks.status import RecordHook

RANKS = RankInfo(0, 8, 0, 4, "n1", 1, "srun", 0)


def test_a_task_of_an_array_is_recorded_as_squeue_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(name, value)
    RecordHook(tmp_path, RANKS, {}, lambda: None).on_run_start(RunStart(20, 100, RunConfig()))
    assert read_status(tmp_path)["job_id"] == this_process().job_id == named("15") == "15_3" != named("16")
    assert Job("15", {"ArrayJobId": "15", "ArrayTaskId": "3"}).name == "15_3" and Job("15", {}).name == "15"


def test_starts_and_ends_are_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2", "CTXLM_ATTEMPT": "job-77-2-0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CTXLM_LOG_FILE", "/logs/77.log")
    hook = RecordHook(tmp_path, RANKS, {"zero_stage": 2}, lambda: None)
    hook.on_run_start(RunStart(20, 100, RunConfig()))
    hook.on_run_end(RunEnd("stopped by signal SIGTERM", 30, 5, 1.0, completed=False))
    with pytest.raises(ValueError, match="bad"):
        fail(hook)
    start, stop, end = read_history(tmp_path)
    assert {key: start[key] for key in ("event", "step", "last_step", "world_size", "job_id", "restart_count")} == {
        "event": "start", "step": 20, "last_step": 100, "world_size": 8, "job_id": "77", "restart_count": 2,
    }  # fmt: skip
    assert start["environment"] == {"zero_stage": 2} and "environment" not in stop
    assert (start["attempt"], start["launcher"], start["log"]) == ("job-77-2-0", "srun", "/logs/77.log")
    assert (stop["event"], stop["step"], stop["completed"], stop["failed"]) == ("end", 30, False, False)
    assert (end["reason"], end["completed"], end["failed"]) == ("ValueError: bad", False, True)


def fail(hook: Hook) -> None:
    """As the trainer tells it: while the exception is on its way."""
    try:
        raise ValueError("bad")
    finally:
        hook.on_run_end(RunEnd("an error", 31, 5, 1.0, completed=True, failed=True))


def test_the_status_file_has_the_last_report_and_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    hook = RecordHook(tmp_path, RANKS, {}, lambda: "step-20")
    hook.on_run_start(RunStart(20, 100, RunConfig()))
    for step in range(21, 36):
        hook.on_step_end(StepMetrics(step, 1.0 / step, {}, {}, 0.1, None, 10, 10, 0.5, 0.1, 0))
    status = read_status(tmp_path)
    assert (status["state"], status["step"], status["of"], status["job_id"]) == ("running", 30, 100, "77")
    assert (status["loss"], status["checkpoint"], status["tokens_per_second"]) == (1 / 30, "step-20", 20)
    assert (status["left_s"], status["starts"]) == (35, 1)
    with pytest.raises(ValueError, match="bad"):
        fail(hook)
    status = read_status(tmp_path)
    assert (status["state"], status["why"], status["last_failure"]) == ("failed", "ValueError: bad", "ValueError: bad")
    hook.on_run_start(RunStart(20, 100, RunConfig()))
    hook.on_run_end(RunEnd("all steps are done", 100, 5, 1.0))
    status = read_status(tmp_path)
    assert (status["state"], status["step"], status["starts"]) == ("completed", 100, 2)
