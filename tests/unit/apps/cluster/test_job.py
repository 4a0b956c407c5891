"""The job's decision table, whose run it refuses, and what it says at its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctxlm_ds.apps.cluster import job, rank_start
from ctxlm_ds.apps.cluster.job import Action, Supervisor, decide, refuse_run_of_another
from ctxlm_ds.apps.cluster.job_context import JobContext, JobSettings, JobSignals
from ctxlm_ds.apps.cluster.rank_start import Outcome, RankStart
from ctxlm_ds.apps.cluster.slurm_commands import Job
from ctxlm_ds.errors import ClusterError, ConfigError
from ctxlm_ds.process.run_files import update_status
from ctxlm_ds.process.run_history import END, FAILURE, REQUEUE, append_event, read_history


def context(run_dir: Path, **changes: Any) -> Any:
    values = {"job_id": "9", "restarts": 0, "settings": JobSettings(), "is_followed": False, **changes}
    return SimpleNamespace(run_dir=run_dir, **values)


def slurm(**states: str) -> Callable[[str], Job]:
    def show(job_id: str) -> Job:
        if f"job_{job_id}" not in states:
            raise ClusterError(f"scontrol show job {job_id}: status 1: Invalid job id specified")
        return Job(job_id, {"JobState": states[f"job_{job_id}"]})

    return show


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    rank_start.begin(tmp_path, "job-7-0-0", "7", "n1")
    return tmp_path


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "SUSPENDED"])
def test_a_job_that_has_the_run_is_named(run_dir: Path, state: str) -> None:
    with pytest.raises(ConfigError, match=rf"is the run of job 7, which is {state.lower()}\..*scancel 7"):
        refuse_run_of_another(run_dir, "9", slurm(job_7=state))


def test_a_job_that_ends_in_order_to_start_again_has_the_run(run_dir: Path, tmp_path: Path) -> None:
    def show(job_id: str) -> Job:
        return Job(job_id, {"JobState": "COMPLETING", "Restarts": "1"})

    with pytest.raises(ConfigError, match="job 7, which is requeued"):
        refuse_run_of_another(run_dir, "9", show)
    rank_start.begin(tmp_path / "for good", "job-7-1-0", "7", "n1")
    refuse_run_of_another(tmp_path / "for good", "9", show)


def test_a_job_that_was_submitted_has_the_run_before_another_is(run_dir: Path) -> None:
    update_status(run_dir, submitted="8")
    states = slurm(job_7="COMPLETED", job_8="PENDING")
    refuse_run_of_another(run_dir, "9", states)
    with pytest.raises(ConfigError, match="job 8, which is pending"):
        refuse_run_of_another(run_dir, None, states)


def test_who_may_have_it(run_dir: Path, tmp_path: Path) -> None:
    busy = slurm(job_7="RUNNING")
    refuse_run_of_another(tmp_path / "new", "9", busy)
    refuse_run_of_another(run_dir, "7", busy)
    for state in ("COMPLETING", "FAILED", "CANCELLED"):
        refuse_run_of_another(run_dir, "9", slurm(job_7=state))
    refuse_run_of_another(run_dir, "9", slurm())
    append_event(run_dir, END, step=100, reason="done", completed=True, failed=False)
    refuse_run_of_another(run_dir, "9", busy)


def stopped(run_dir: Path) -> RankStart:
    record = rank_start.begin(run_dir, "job-9-0-0", "9", "n1")
    return RankStart(record, Outcome.STOPPED, "stopped by signal SIGTERM", 0)


@pytest.mark.parametrize(
    ("restarts", "told"),
    [
        ("0", "the job has been cancelled; to resume: submit the same command again"),
        ("1", "Slurm has requeued the job"),
    ],
)
def test_a_job_that_slurm_ends_says_whether_it_goes_on(
    restarts: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = Job("9", {"JobState": "CANCELLED", "Restarts": restarts})
    monkeypatch.setattr(job.slurm, "show_job", lambda job_id: shown)
    assert Supervisor(context(tmp_path), JobSignals()).end(Action.LEAVE, stopped(tmp_path)) == 0
    assert capfd.readouterr().out.endswith(f"job: stopped as asked: stopped by signal SIGTERM; {told}\n")


def test_a_start_that_slurm_kills_at_the_time_limit_is_not_called_a_node_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = Job("9", {"JobState": "COMPLETING", "Reason": "TimeLimit"})
    monkeypatch.setattr(job.slurm, "show_job", lambda *_, **__: shown)
    monkeypatch.setattr(job.slurm, "requeue", lambda job_id: None)
    stopped(tmp_path)
    signals = JobSignals()
    signals.name, signals.count = "SIGTERM", 1
    step = rank_start.start_srun(["sleep", "60"], os.environ)
    assert Supervisor(context(tmp_path), signals).watch(step, list) == -signal.SIGUSR1
    assert "Slurm ends the job (TimeLimit): job 9 is requeued" in capfd.readouterr().out
    (told,) = rank_start.note_cut_short(tmp_path, "9")
    assert told == "start job-9-0-0 on n1 ended with its job: Slurm ends the job (TimeLimit)"


def test_where_requeueing_is_disabled_the_next_task_of_an_array_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(job_id: str) -> None:
        raise ClusterError("scontrol requeue 9: status 1: Requested operation is presently disabled for job 9")

    monkeypatch.setattr(job.slurm, "requeue", refuse)
    with pytest.raises(ClusterError, match=r"presently disabled.*--array=1-10%1"):
        Supervisor(context(tmp_path), JobSignals()).end(Action.CONTINUE_LATER, stopped(tmp_path))
    assert read_history(tmp_path)[-1]["event"] == FAILURE
    assert (
        Supervisor(context(tmp_path, is_followed=True), JobSignals()).end(Action.CONTINUE_LATER, stopped(tmp_path)) == 0
    )
    assert read_history(tmp_path)[-1]["event"] == REQUEUE
    assert capfd.readouterr().out.endswith("the next task of the array continues the run\n")


def test_later_tasks_of_an_array_end_when_the_run_is_complete(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints" / "step-00000100").mkdir(parents=True)
    append_event(tmp_path, END, step=100, reason="done", completed=True, failed=False)
    environ = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MAX": "3"}
    task = JobContext("9", 0, "n1", ("n1",), (), (), tmp_path, 100, JobSettings(), environ, in_series=True)
    assert task.is_followed and Supervisor(task, JobSignals()).run() == 0
    assert "nothing is left for this task" in capfd.readouterr().out


CALM = {
    "outcome": Outcome.FAILED, "still_ours": True, "time_is_up": False, "broken_nodes": False, "may_continue": True,
    "gives_up": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Action.RESTART),
        ({"time_is_up": True}, Action.CONTINUE_LATER),
        ({"broken_nodes": True}, Action.CONTINUE_LATER),
        ({"gives_up": True}, Action.GIVE_UP),
        ({"gives_up": True, "time_is_up": True}, Action.GIVE_UP),
        ({"still_ours": False}, Action.LEAVE),
        ({"may_continue": False}, Action.STOP),
        ({"outcome": Outcome.STOPPED}, Action.CONTINUE_LATER),
        ({"outcome": Outcome.STOPPED, "gives_up": True}, Action.GIVE_UP),
        ({"outcome": Outcome.STOPPED, "still_ours": False}, Action.LEAVE),
        ({"outcome": Outcome.STOPPED, "may_continue": False}, Action.STOP),
        ({"outcome": Outcome.COMPLETED}, Action.DONE),
        ({"outcome": Outcome.COMPLETED, "still_ours": False, "time_is_up": True}, Action.DONE),
        ({"outcome": Outcome.STOPPED_FOR_GOOD}, Action.DONE),
        ({"outcome": Outcome.USER_ERROR}, Action.STOP),
        ({"outcome": Outcome.USER_ERROR, "broken_nodes": True}, Action.STOP),
        ({"outcome": Outcome.TRAINING_ERROR, "time_is_up": True}, Action.STOP),
    ],
)
def test_the_table(changes: dict[str, object], expected: Action) -> None:
    assert decide(**{**CALM, **changes}) is expected  # type: ignore[arg-type]
