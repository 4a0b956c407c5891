"""The job refuses a run that another job has or is queued for, and says at its end whether the run continues."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctxlm_ds.apps.cluster import start_records
from ctxlm_ds.apps.cluster.job import Endings, refuse_if_taken
from ctxlm_ds.apps.cluster.rank_start import RankStart
from ctxlm_ds.apps.cluster.restart_policy import Action, Ended, Outcome
from ctxlm_ds.apps.cluster.slurm_commands import Job
from ctxlm_ds.errors import ClusterError, ConfigError
from ctxlm_ds.process.run_history import END, append_event


def context(run_dir: Path, **changes: Any) -> Any:
    return SimpleNamespace(**{"run_dir": run_dir, "job_id": "9", "chain": "9", "restarts": 0, **changes})


def slurm(**states: str) -> Callable[[str], Job]:
    def show(job_id: str) -> Job:
        if f"job_{job_id}" not in states:
            raise ClusterError(f"scontrol show job {job_id}: status 1: Invalid job id specified")
        return Job(job_id, {"JobState": states[f"job_{job_id}"]})

    return show


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    start_records.begin(tmp_path, "job-7-0-0", "7", "7", "n1")
    return tmp_path


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "SUSPENDED"])
def test_a_job_that_has_the_run_is_named(run_dir: Path, state: str) -> None:
    with pytest.raises(ConfigError, match=rf"is the run of job 7, which is {state.lower()}\..*scancel 7"):
        refuse_if_taken(context(run_dir), slurm(job_7=state))


def test_a_job_that_ends_in_order_to_start_again_has_the_run(run_dir: Path, tmp_path: Path) -> None:
    def show(job_id: str) -> Job:
        return Job(job_id, {"JobState": "COMPLETING", "Restarts": "1"})

    with pytest.raises(ConfigError, match="job 7, which is requeued"):
        refuse_if_taken(context(run_dir), show)
    start_records.begin(tmp_path / "for good", "job-7-1-0", "7", "7", "n1")
    refuse_if_taken(context(tmp_path / "for good"), show)


def test_a_successor_that_waits_has_the_run(run_dir: Path) -> None:
    (run_dir / "successor.json").write_text(json.dumps({"job_id": "8", "after": "7"}))
    refuse_if_taken(context(run_dir), slurm(job_7="COMPLETED", job_8="COMPLETED"))
    with pytest.raises(ConfigError, match="job 8, which is pending"):
        refuse_if_taken(context(run_dir), slurm(job_7="COMPLETED", job_8="PENDING"))


def test_who_may_have_it(run_dir: Path, tmp_path: Path) -> None:
    busy = slurm(job_7="RUNNING")
    refuse_if_taken(context(tmp_path / "new"), busy)
    refuse_if_taken(context(run_dir, job_id="7", chain="7"), busy)
    refuse_if_taken(context(run_dir, restarts=1), busy)
    refuse_if_taken(context(run_dir, chain="7"), busy)
    for state in ("COMPLETING", "FAILED", "CANCELLED"):
        refuse_if_taken(context(run_dir), slurm(job_7=state))
    refuse_if_taken(context(run_dir), slurm())
    append_event(run_dir, END, step=100, reason="done", completed=True, failed=False)
    refuse_if_taken(context(run_dir), busy)


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
    job = Job("9", {"JobState": "CANCELLED", "Restarts": restarts})
    monkeypatch.setattr("ctxlm_ds.apps.cluster.job.show_job", lambda job_id: job)
    record = start_records.begin(tmp_path, "job-9-0-0", "9", "9", "n1")
    start = RankStart(record, Ended(Outcome.STOPPED, "stopped by signal SIGTERM", 0))
    successors: Any = SimpleNamespace(cancel=lambda begun: None)
    assert Endings(context(tmp_path), successors).end(Action.LEAVE, start) == 0
    assert capfd.readouterr().out.endswith(f"job: stopped in order: stopped by signal SIGTERM; {told}\n")
