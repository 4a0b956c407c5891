"""The status of runs whose jobs were cancelled, or ended before their ranks came as far as training."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ctxlm_ds.apps.cluster.job import Action, Endings
from ctxlm_ds.apps.cluster.job_context import JobContext
from ctxlm_ds.apps.cluster.rank_failures import gather_failures
from ctxlm_ds.apps.cluster.rank_start import RankStart, prepare
from ctxlm_ds.apps.cluster.restart_policy import Ended, Outcome
from ctxlm_ds.apps.cluster.run_status import details, remarks
from ctxlm_ds.apps.cluster.settings import read_settings
from ctxlm_ds.apps.cluster.start_records import CANCELLED, StartRecord, begin, finish
from ctxlm_ds.apps.cluster.status import ask_queue
from ctxlm_ds.process.run_history import END, FAILURE, FailureRecord, append_event, write_record
from tests.unit.apps.cluster.status_runs import ATTEMPT, leave_lock, make_run, started, status

WHY = "stopped by signal SIGTERM"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def begun(run_dir: Path) -> StartRecord:
    return begin(run_dir, ATTEMPT, "7", "7", "n[1-2]")


# Cancelled


def cancel(run_dir: Path, attempt: StartRecord, ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's own end after scancel."""
    job = SimpleNamespace(restarts=0)
    monkeypatch.setattr("ctxlm_ds.apps.cluster.job.show_job", lambda job_id: job)
    context = SimpleNamespace(run_dir=run_dir, job_id="7", restarts=0)
    successors = SimpleNamespace(cancel=lambda begun: None)
    Endings(cast(Any, context), cast(Any, successors)).end(Action.LEAVE, RankStart(attempt, ended))


def test_a_run_cancelled_in_order_is_stopped(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = begun(run_dir)
    started(run_dir)
    append_event(run_dir, END, step=20, reason=WHY, completed=False, failed=False, attempt=ATTEMPT)
    cancel(run_dir, attempt, Ended(Outcome.STOPPED, WHY, 0), monkeypatch)
    # Also while Slurm still clears up after it.
    for found in (status(run_dir), status(run_dir, job_7="COMPLETING"), status(run_dir, job_7="CANCELLED")):
        assert (found.state, found.why, found.ends) == ("stopped", f"cancelled: {WHY}", [f"{WHY}; cancelled"])
    assert remarks([found]) == [f"{run_dir}: stopped: cancelled: {WHY}"]


def test_a_run_cancelled_after_it_failed_has_failed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = begun(run_dir)
    started(run_dir)
    cancel(run_dir, attempt, Ended(Outcome.FAILED, "rank 1 on n2: Hang", 4), monkeypatch)
    found = status(run_dir)
    assert (found.state, found.why, found.ends) == ("failed", "rank 1 on n2: Hang", ["rank 1 on n2: Hang"])


def test_a_failure_with_status_0_is_no_cancellation(run_dir: Path) -> None:
    started(run_dir)
    append_event(run_dir, FAILURE, why="x", attempt=ATTEMPT, job_id="7", exit_status=0)
    assert (status(run_dir).state, CANCELLED) == ("failed", "the job has been cancelled")


# Before training


def test_a_failure_before_training(run_dir: Path) -> None:
    attempt = begun(run_dir)
    why = "rank 0 on n1: DataError: /nowhere/at-all.bin: no such file"
    finish(run_dir, attempt, FAILURE, why, exit_status=2)
    found = status(run_dir)
    assert (found.state, found.why) == ("failed", why)
    assert f"  why         {why}" in details(found)


def test_a_job_that_has_only_begun(tmp_path: Path) -> None:
    begun(tmp_path)
    found = status(tmp_path)
    assert (found.state, found.job_id) == ("never started", "7")
    assert status(tmp_path, job_7="RUNNING").state == "starting"


MISTAKE = "{run}/checkpoints/step-00000020 cannot be continued with what has changed since:\n  training.seed: 1 -> 9"


def resubmit(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> StartRecord:
    """A complete run (job 7), and the beginning of job 28 with other settings."""
    started(run_dir)
    append_event(run_dir, END, step=100, reason="all steps", completed=True, failed=False, attempt=ATTEMPT)
    monkeypatch.setattr("ctxlm_ds.apps.cluster.start_records.job_log", lambda: "/logs/28.log")
    return begin(run_dir, "job-28-0-0", "28", "28", "n1")


def test_an_early_failure_has_its_own_log_and_all_lines(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = resubmit(run_dir, monkeypatch)
    folder = run_dir / "attempts" / attempt.name
    record = FailureRecord(time.time(), 0, "n1", 2, "CheckpointError", MISTAKE.format(run=run_dir))
    write_record(folder, record)
    (failure,) = gather_failures(folder, [], {})
    finish(run_dir, attempt, FAILURE, failure.describe(), exit_status=2, first_rank=0)
    found = status(run_dir, job_28="FAILED")
    assert (found.state, found.job_id, found.log) == ("failed", "28", "/logs/28.log")
    assert found.ends[0] == "all steps" and found.ends[1].endswith("changed since: training.seed: 1 -> 9")
    lines = "\n".join(details(found)).splitlines()
    assert lines[2].startswith("  why         rank 0 on n1: CheckpointError: ")
    assert lines[3] == " " * 16 + "training.seed: 1 -> 9"
    assert remarks([found])[0].count("\n") == 0


def test_a_start_that_has_not_trained_yet_has_its_own_log(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resubmit(run_dir, monkeypatch)
    # Before and after it takes the run's lock.
    for taken in (False, True):
        if taken:
            leave_lock(run_dir, age_s=1, job_id="28", acquired_unix_s=time.time())
        found = status(run_dir, job_28="RUNNING")
        assert found.state == ("starting" if taken else "restarting")
        assert (found.job_id, found.log, found.ends, found.restarts) == ("28", "/logs/28.log", ["all steps"], 1)


def test_a_task_of_an_array_has_its_name_in_the_queue(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    begun(run_dir)
    found = status(run_dir, job_7="RUNNING")
    assert (found.state, found.why, found.job_id) == ("starting", "job 6_0 is running", "7")
    assert "  job         6_0" in details(found)


def test_the_queue_is_asked_by_the_ids_of_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As squeue answers: a task of an array has an id and a name."""
    squeue = 'case "$*" in *"--array --format=%A %T %i"*) echo 7 RUNNING 6_0; echo 6 PENDING 6_1;; esac'
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n{squeue}\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert ask_queue(["7"]) == {"7": "RUNNING", "6_0": "RUNNING", "6": "PENDING", "6_1": "PENDING"}


def test_a_start_that_was_cancelled_early_is_listed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = begun(run_dir)
    cancel(run_dir, attempt, Ended(Outcome.STOPPED, "asked to stop before it could", 0), monkeypatch)
    found = status(run_dir)
    assert (found.state, found.ends) == ("stopped", ["asked to stop before it could; cancelled"])


def test_a_start_that_another_job_kept_out_is_not_listed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = resubmit(run_dir, monkeypatch)
    refusal = FailureRecord(time.time(), 0, "n1", 2, "RunLockedError", "in use by process 5")
    write_record(run_dir / "attempts" / attempt.name, refusal)
    found = status(run_dir)
    assert (found.state, found.log, found.ends) == ("completed", "/logs/7.log", ["all steps"])


def test_a_damaged_start_json_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "attempts" / ATTEMPT / "start.json"
    path.parent.mkdir(parents=True)
    whole = '"chain": "7", "job_id": "7", "checkpoint_step": null, "nodes": "n1"'
    for text in ("{}", "[", '{"job_id": [7]}', f'{{"name": "{ATTEMPT}", "time_unix_s": Infinity, {whole}}}'):
        path.write_text(text)
        assert (status(tmp_path).state, status(tmp_path).why) == ("never started", None)


def test_a_wrong_preflight_setting_is_an_end_on_record(tmp_path: Path) -> None:
    """Not an error past everything that notes the end, cancels the successor and shows in the status."""
    context = SimpleNamespace(
        environ={"CTXLM_PREFLIGHT": "1", "CTXLM_PREFLIGHT_LIMIT_S": "soon"}, run_dir=tmp_path, job_id="7",
        tasks={"n1": 1}, task_words=(), settings=read_settings({}), words=("--config", "x.yaml"),
    )  # fmt: skip
    prepared = prepare(cast(JobContext, context), ATTEMPT, lambda: False)
    assert prepared.ended is not None and "CTXLM_PREFLIGHT_LIMIT_S=soon" in prepared.ended.why
    assert (prepared.ended.outcome, prepared.ended.exit_status) == (Outcome.USER_ERROR, 2)
