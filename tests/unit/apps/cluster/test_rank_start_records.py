"""Starts of a run: their folders, their ends, and the count of those that bring nothing."""

from __future__ import annotations

from pathlib import Path

from ctxlm_ds.apps.cluster.rank_start import (
    CANCELLED,
    StartRecord,
    begin,
    cut_short,
    finish,
    fruitless_starts,
    note_cut_short,
)
from ctxlm_ds.process.run_files import read_status
from ctxlm_ds.process.run_history import END, FAILURE, GIVE_UP, REQUEUE, append_event, read_history


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
    assert cut_short(tmp_path, "7") == [lost] and cut_short(tmp_path, "8") == [other] and done != lost
    assert "node failure" in note_cut_short(tmp_path, lost)
    assert cut_short(tmp_path, "7") == []
    assert read_history(tmp_path)[-1]["event"] == FAILURE and read_history(tmp_path)[-1]["attempt"] == lost.name


def test_ranks_that_stopped_in_order_are_no_failure(tmp_path: Path) -> None:
    """The job was killed while it waited for its ranks to go."""
    lost = start(tmp_path, 0)
    append_event(
        tmp_path, END, step=5, reason="stopped by signal SIGTERM", completed=False, failed=False, attempt=lost.name
    )
    assert note_cut_short(tmp_path, lost) == "stopped by signal SIGTERM"
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
