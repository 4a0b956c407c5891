"""How a start ended, by what its ranks left; what the job says when it passes a notice on to them.

Starts of a run: their folders, their ends, and the count of those that bring nothing.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ctxlm_ds.apps.cluster.job import Supervisor
from ctxlm_ds.apps.cluster.job_context import JobContext, JobSettings, JobSignals, read_settings
from ctxlm_ds.apps.cluster.rank_start import (
    CANCELLED,
    Outcome,
    RankStart,
    StartRecord,
    begin,
    finish,
    fruitless_starts,
    is_known_host,
    note_cut_short,
    read_outcome,
    srun_command,
    start_srun,
    step_environment,
)
from ctxlm_ds.apps.cluster.slurm_commands import Job
from ctxlm_ds.errors import ClusterError
from ctxlm_ds.process.failure import FailureRecord
from ctxlm_ds.process.run_files import read_status
from ctxlm_ds.process.run_history import END, FAILURE, GIVE_UP, REQUEUE, START, append_event, read_history


def failure(exit_status: int, error: str = "ValueError", signal: int | None = None) -> FailureRecord:
    return FailureRecord(0.0, 1, "n2", exit_status, error, "text", signal=signal)


def judge(run_dir: Path, status: int, *failures: FailureRecord, before: int = 0, told: bool = False) -> RankStart:
    job = SimpleNamespace(run_dir=run_dir, job_id="7", max_steps=100)
    record = StartRecord("job-7-0-0", "7", 0.0, None, "n2")
    return RankStart(record, *read_outcome(cast("JobContext", job), before, status, failures, told))


def end(run_dir: Path, reason: str, completed: bool = False, failed: bool = False) -> None:
    append_event(run_dir, END, step=5, reason=reason, completed=completed, failed=failed)


@pytest.mark.parametrize(
    ("reason", "completed", "expected"),
    [
        ("training.max_steps (100) reached", True, Outcome.COMPLETED),
        ("stopped by signal SIGUSR1", False, Outcome.STOPPED),
        ("training.max_hours (2) reached", False, Outcome.STOPPED),
        ("stopped by signal SIGINT", False, Outcome.STOPPED_FOR_GOOD),
    ],
)
def test_the_last_end_tells_and_not_the_status(tmp_path: Path, reason: str, completed: bool, expected: Outcome) -> None:
    """A rank may still be killed while the interpreter shuts down."""
    append_event(tmp_path, START, step=0)
    end(tmp_path, reason, completed)
    assert judge(tmp_path, 137, failure(137, signal=9)).outcome is expected


def test_the_end_of_a_phase_is_none(tmp_path: Path) -> None:
    """The start went on to the next phase, in which a rank was killed."""
    began = begin(tmp_path, "job-7-0-0", "7", "n2")
    append_event(tmp_path, END, step=5, reason="phase 1 is over at step 5", completed=False, failed=False,
                 phase_over=True, attempt=began.name)  # fmt: skip
    assert judge(tmp_path, 137, failure(137, signal=9)).outcome is Outcome.FAILED
    (told,) = note_cut_short(tmp_path, "7")
    assert "node failure or kill of the job" in told


def test_an_earlier_start_s_end_is_none(tmp_path: Path) -> None:
    end(tmp_path, "training.max_steps (100) reached", completed=True)
    before = len(read_history(tmp_path))
    assert judge(tmp_path, 1, failure(1), before=before).outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("status", "expected"),
    [(1, Outcome.FAILED), (2, Outcome.USER_ERROR), (3, Outcome.TRAINING_ERROR), (4, Outcome.FAILED)],
)
def test_the_first_rank_s_status_tells(tmp_path: Path, status: int, expected: Outcome) -> None:
    end(tmp_path, "an error", failed=True)
    ended = judge(tmp_path, 143, failure(status), failure(1))
    assert ended.outcome is expected and ended.exit_status == status and "rank 1 on n2" in ended.why


def test_a_status_alone_tells_where_no_rank_left_anything(tmp_path: Path) -> None:
    assert judge(tmp_path, 2).outcome is Outcome.USER_ERROR
    assert judge(tmp_path, 1).outcome is Outcome.FAILED
    assert judge(tmp_path, -9).why == "srun ended by signal 9"


def test_a_lost_end_event_is_told_by_the_checkpoints(tmp_path: Path) -> None:
    assert judge(tmp_path, 0).outcome is Outcome.STOPPED
    (tmp_path / "checkpoints" / "step-00000100").mkdir(parents=True)
    assert judge(tmp_path, 0).outcome is Outcome.COMPLETED


def test_the_notice_may_kill_ranks_that_are_still_importing(tmp_path: Path) -> None:
    assert judge(tmp_path, 138, failure(138, signal=10), told=True).outcome is Outcome.STOPPED
    assert judge(tmp_path, 138, failure(138, signal=10)).outcome is Outcome.FAILED
    assert judge(tmp_path, 1, failure(1), told=True).outcome is Outcome.FAILED


@pytest.mark.parametrize(("holder", "expected"), [("7", Outcome.FAILED), ("8", Outcome.USER_ERROR)])
def test_a_lock_that_this_job_left_is_no_user_s_error(tmp_path: Path, holder: str, expected: Outcome) -> None:
    (tmp_path / "lock.json").write_text(json.dumps({"job_id": holder}))
    assert judge(tmp_path, 2, failure(2, "RunLockedError")).outcome is expected


def told_srun(signals: JobSignals, lines: list[str]) -> int:
    """Status of a stand-in for srun that ends at USR1, which it gets because of `signals`."""
    script = "trap 'echo told; exit 5' USR1; echo up; while :; do sleep 0.05; done"
    step = start_srun(["bash", "-c", script], {"PATH": "/usr/bin:/bin"})
    assert step.stdout is not None
    lines.append(step.stdout.readline())  # the trap is set
    context = SimpleNamespace(job_id="7", run_dir=Path())
    return Supervisor(cast("JobContext", context), signals).watch(step, lines.extend)


@pytest.mark.parametrize(
    ("end_s", "told"),
    [
        (300, r"SIGUSR1, [45]:\d\d before the time limit: the ranks save and stop"),
        (None, "SIGUSR1: the ranks save and stop"),
    ],
)
def test_the_notice_says_how_near_the_limit_is(
    end_s: int | None, told: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def show(job_id: str, patience_s: float) -> Job:
        if end_s is None:
            raise ClusterError("scontrol show job 7: no answer within 20 s")
        times = {"StartTime": time.time() - 7200, "EndTime": time.time() + end_s}
        texts = {name: time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(then)) for name, then in times.items()}
        return Job(job_id, texts)

    monkeypatch.setattr("ctxlm_ds.apps.cluster.job.slurm.show_job", show)
    signals = JobSignals()
    signals.name, signals.count = "SIGUSR1", 1
    lines: list[str] = []
    assert (told_srun(signals, lines), lines) == (5, ["up\n", "told\n"])
    assert re.fullmatch(rf"\d\d:\d\d:\d\d job: {told}\n", capfd.readouterr().out)


@pytest.mark.parametrize(("name", "runs"), [("SIGUSR1", True), ("SIGTERM", False)])
def test_an_early_notice_is_kept_for_the_ranks(
    name: str, runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of five minutes has it before they start; they get it when a quarter is left, unless they end before."""
    now = time.time()
    times = {"StartTime": now - 5, "EndTime": now + 295}
    texts = {name: time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(then)) for name, then in times.items()}
    monkeypatch.setattr("ctxlm_ds.apps.cluster.job.slurm.show_job", lambda job_id, patience_s: Job(job_id, texts))
    monkeypatch.setenv("CTXLM_NOTICE", name)
    srun = ["sh", "-c", "trap 'exit 5' USR1; for _ in $(seq 40); do sleep 0.1; done; exit 3"]
    monkeypatch.setattr("ctxlm_ds.apps.cluster.rank_start.srun_command", lambda *_: srun)
    context = JobContext(
        job_id="7", restarts=0, node_list="localhost", nodes=("localhost",), task_words=(), words=(), run_dir=tmp_path,
        max_steps=9, settings=read_settings({}), environ={},
    )  # fmt: skip
    start = Supervisor(context, JobSignals())._start()
    assert start.outcome is (Outcome.TRAINING_ERROR if runs else Outcome.STOPPED) and time.time() - now < 60
    if runs:
        monkeypatch.setenv("CTXLM_NOTICE", name)
        monkeypatch.setattr("ctxlm_ds.apps.cluster.job.slurm.stop_delay_s", lambda *_: 1.5)
        assert Supervisor(context, JobSignals())._start().exit_status == 5


def test_ranks_in_containers() -> None:
    options = {"CTXLM_CONTAINER_OPTIONS": "--bind /d", "CTXLM_SRUN_OPTIONS": "--cpu-bind=cores"}
    apptainer = read_settings({"CTXLM_CONTAINER": "a.sif", **options})
    words = srun_command([apptainer.python, "-m", "x"], apptainer)
    assert " ".join(words).endswith("--cpu-bind=cores apptainer exec --nv --bind /d a.sif python3 -m x")
    pyxis = read_settings({"CTXLM_PYXIS": "b.sqsh", "CTXLM_PYXIS_OPTIONS": "--container-mounts=/d"})
    words = srun_command([pyxis.python, "-m", "x"], pyxis)
    assert " ".join(words).endswith("--container-image=b.sqsh --container-mounts=/d python3 -m x")
    assert JobSettings().python == sys.executable


def test_the_ranks_environment() -> None:
    found = step_environment({"SLURM_CPUS_PER_TASK": "8", "A": "b"}, "job-1-0-0", "localhost")
    assert found["A"] == "b" and found["CTXLM_ATTEMPT"] == "job-1-0-0" and "MASTER_PORT" not in found
    assert found["SRUN_CPUS_PER_TASK"] == "8", "a step of Slurm 22.05 does not take the job's --cpus-per-task by itself"
    assert step_environment({"MASTER_PORT": "1"}, "a", "localhost")["MASTER_PORT"] == "1"


def test_hosts() -> None:
    assert is_known_host("localhost") and not is_known_host("no-such-host.invalid")


def checkpoint(run_dir: Path, step: int) -> None:
    """A checkpoint as far as a listing sees."""
    (run_dir / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)


def start(run_dir: Path, number: int, job: str = "7") -> StartRecord:
    return begin(run_dir, f"job-{job}-0-{number}", job, "n[1-2]")


def fail(run_dir: Path, number: int, job: str = "7", event: str = FAILURE) -> StartRecord:
    attempt = start(run_dir, number, job)
    finish(run_dir, attempt, event, f"reason {number}")
    return attempt


def test_starts_without_a_new_checkpoint_are_counted(tmp_path: Path) -> None:
    fail(tmp_path, 0)
    fail(tmp_path, 1, event=REQUEUE)
    now = start(tmp_path, 2)
    assert [event["why"] for event in fruitless_starts(tmp_path, now)] == ["reason 0", "reason 1"]
    checkpoint(tmp_path, 10)
    assert fruitless_starts(tmp_path, now) == []


def test_progress_ends_the_count(tmp_path: Path) -> None:
    fail(tmp_path, 0)
    attempt = start(tmp_path, 1)
    checkpoint(tmp_path, 10)
    finish(tmp_path, attempt, FAILURE, "reason 1")
    fail(tmp_path, 2)
    assert [event["why"] for event in fruitless_starts(tmp_path, start(tmp_path, 3))] == ["reason 2"]


def test_a_start_with_two_events_counts_once(tmp_path: Path) -> None:
    attempt = fail(tmp_path, 0)
    finish(tmp_path, attempt, REQUEUE, "reason 0")
    assert len(fruitless_starts(tmp_path, start(tmp_path, 1))) == 1


def test_only_this_job_since_it_last_gave_up(tmp_path: Path) -> None:
    fail(tmp_path, 0, job="7")
    fail(tmp_path, 0, job="8")
    assert len(fruitless_starts(tmp_path, start(tmp_path, 1, job="8"))) == 1
    append_event(tmp_path, GIVE_UP, why="no progress", job_id="7")
    assert fruitless_starts(tmp_path, start(tmp_path, 1, job="7")) == []


def test_a_start_that_ended_with_its_job_is_found_and_noted(tmp_path: Path) -> None:
    done = fail(tmp_path, 0)
    lost = start(tmp_path, 1)
    other = start(tmp_path, 0, job="8")
    (told,) = note_cut_short(tmp_path, "7")
    assert lost.name in told and "node failure" in told and done != lost
    assert list(note_cut_short(tmp_path, "7")) == []
    assert read_history(tmp_path)[-1]["event"] == FAILURE and read_history(tmp_path)[-1]["attempt"] == lost.name
    assert other.name in next(note_cut_short(tmp_path, "8"))


def test_ranks_that_stopped_in_order_are_no_failure(tmp_path: Path) -> None:
    """The job was killed while it waited for its ranks to go."""
    lost = start(tmp_path, 0)
    append_event(
        tmp_path, END, step=5, reason="stopped by signal SIGTERM", completed=False, failed=False, attempt=lost.name
    )
    assert next(note_cut_short(tmp_path, "7")).endswith("stopped by signal SIGTERM")
    assert read_history(tmp_path)[-1]["event"] == REQUEUE


def test_the_status_follows_the_outcome(tmp_path: Path) -> None:
    attempt = start(tmp_path, 0)
    assert (read_status(tmp_path)["state"], read_status(tmp_path)["job_id"]) == ("starting", "7")
    finish(tmp_path, attempt, FAILURE, "rank 1 on n2 was killed")
    found = read_status(tmp_path)
    assert (found["state"], found["why"], found["last_failure"]) == ("failed", found["why"], "rank 1 on n2 was killed")
    finish(tmp_path, attempt, REQUEUE, "stopped by signal SIGUSR1", how="job 7 is requeued")
    found = read_status(tmp_path)
    assert (found["state"], found["why"]) == ("queued", "job 7 is requeued: stopped by signal SIGUSR1")
    finish(tmp_path, attempt, FAILURE, "stopped by signal SIGTERM", how=CANCELLED, exit_status=0)
    assert read_status(tmp_path)["state"] == "stopped" and found["last_failure"] == "rank 1 on n2 was killed"
