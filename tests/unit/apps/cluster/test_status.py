"""The status of runs: each state, the figures, and folders with any file damaged or missing."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxlm_ds.apps.cluster.run_status import checkpoint_cell, details, remarks, table
from ctxlm_ds.apps.cluster.start_records import begin
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, step_name
from ctxlm_ds.process.run_history import (
    END,
    FAILURE,
    GIVE_UP,
    HISTORY_NAME,
    REQUEUE,
    ROLLBACK,
    SAVE_FAILED,
    SKIP,
    FailureRecord,
    append_event,
    write_record,
)
from ctxlm_ds.process.run_lock import LOCK_NAME, RunLock
from tests.unit.apps.cluster.status_runs import ATTEMPT, leave_lock, line, make_run, started, status


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


@pytest.fixture
def lock(run_dir: Path) -> Iterator[RunLock]:
    with RunLock(run_dir).acquire() as held:
        yield held


# States


def test_running(run_dir: Path, lock: RunLock) -> None:
    assert status(run_dir).state == "starting"
    started(run_dir)
    found = status(run_dir)
    assert (found.state, found.why, found.job_id, found.log) == ("running", None, "7", "/logs/7.log")
    assert (found.step, found.max_steps, found.loss, found.restarts) == (20, 100, 6.8, 0)
    assert found.tokens_per_second == pytest.approx(999)
    assert (found.checkpoint_step, found.checkpoint_problem) == (20, None)
    assert found.checkpoint_age_s is not None and found.eta_s is not None
    assert details(found)[2] == "  step        20/100"


def test_time_left_goes_by_the_pace_since_the_start(run_dir: Path, lock: RunLock) -> None:
    started(run_dir, step=10)
    os.utime(run_dir / "metrics.jsonl", (time.time() + 30,) * 2)
    # Ten steps in half a minute, evaluations and saves included: 80 more in 4 minutes.
    assert status(run_dir).eta_s == pytest.approx(240, rel=0.2)


def test_time_left_is_without_the_first_step(run_dir: Path, lock: RunLock) -> None:
    lines = [{**line(step), "step_seconds": 222.0 if step == 11 else 0.5} for step in range(11, 21)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    started(run_dir, step=10)
    os.utime(run_dir / "metrics.jsonl", (time.time() + 222 + 4.5,) * 2)
    assert status(run_dir).eta_s == pytest.approx(80 * 0.5, rel=0.1)
    (run_dir / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    os.utime(run_dir / "metrics.jsonl", (time.time() + 222,) * 2)
    assert status(run_dir).eta_s is None


def test_tokens_may_be_the_nearer_limit(run_dir: Path, lock: RunLock) -> None:
    (run_dir / "config.yaml").write_text("training:\n  max_steps: 100\n  max_tokens: 15000\n")
    started(run_dir, step=10)
    os.utime(run_dir / "metrics.jsonl", (time.time() + 30,) * 2)
    assert status(run_dir).eta_s == pytest.approx(30, rel=0.2)


def test_completed_and_stopped(run_dir: Path) -> None:
    started(run_dir)
    append_event(run_dir, END, step=23, reason="stopped by signal SIGTERM", completed=False, failed=False)
    found = status(run_dir)
    assert (found.state, found.why, found.eta_s) == ("stopped", "stopped by signal SIGTERM", None)
    assert (found.step, found.loss) == (23, line(20)["loss"])
    started(run_dir, step=20)
    append_event(run_dir, END, step=100, reason="training.max_steps (100) reached", completed=True, failed=False)
    found = status(run_dir, job_7="PENDING")
    assert (found.state, found.restarts) == ("completed", 1)
    assert found.ends == ["stopped by signal SIGTERM", "training.max_steps (100) reached"]


def test_stale_locks(run_dir: Path) -> None:
    started(run_dir)
    leave_lock(run_dir, age_s=600)
    found = status(run_dir)
    assert found.state == "stale" and "on elsewhere (Slurm job 7) for 10 minutes" in str(found.why)
    leave_lock(run_dir, age_s=10)
    assert status(run_dir).state == "running"
    leave_lock(run_dir, age_s=10, host=socket.gethostname(), pid=2**22 + 1)
    found = status(run_dir)
    assert found.state == "stale" and "has ended and recorded no reason" in str(found.why)


def test_a_hang_and_a_failure(run_dir: Path) -> None:
    started(run_dir)
    folder = run_dir / "attempts" / ATTEMPT
    leave_lock(run_dir, age_s=10, host=socket.gethostname(), pid=2**22 + 1)
    write_record(folder, FailureRecord(time.time(), 1, "n2", 4, "Hang", "training, after step 20, no progress"))
    write_record(folder, FailureRecord(time.time(), 0, "n1", 1, "RuntimeError", "reset", consequence=True))
    found = status(run_dir)
    assert found.state == "failed"
    assert found.why == "rank 1 on n2: Hang: training, after step 20, no progress"
    assert found.ends == [f"{found.why} ({folder / 'stacks.txt'})"]
    append_event(run_dir, FAILURE, why="rank 1 on n2: Hang", attempt=ATTEMPT, job_id="7", exit_status=4)
    assert (status(run_dir).state, status(run_dir).why) == ("failed", "rank 1 on n2: Hang")
    assert status(run_dir, job_7="RUNNING").state == "restarting"
    append_event(run_dir, GIVE_UP, why="gave up: 3 starts in a row made no progress", job_id="7")
    assert status(run_dir).why == "gave up: 3 starts in a row made no progress"
    assert status(run_dir).ends == ["rank 1 on n2: Hang; the job gave up"]


def test_requeued(run_dir: Path) -> None:
    started(run_dir)
    append_event(run_dir, END, step=20, reason="stopped by signal SIGUSR1", completed=False, failed=False)
    append_event(
        run_dir, REQUEUE, why="stopped by signal SIGUSR1", how="job 7 is requeued", job_id="7", attempt=ATTEMPT
    )
    assert status(run_dir).state == "queued"
    assert status(run_dir, job_7="PENDING").why == "job 7 is pending"
    assert status(run_dir).ends == ["stopped by signal SIGUSR1; requeued"]
    found = status(run_dir, job_7="CANCELLED")
    assert (found.state, found.why) == ("stopped", "requeued, and job 7 is cancelled since")
    (run_dir / "attempts" / "job-7-1-0").mkdir(parents=True)
    (run_dir / "attempts" / "job-7-1-0" / "start.json").write_text("{}")
    assert status(run_dir, job_7="RUNNING").state == "restarting"


def test_a_successor_waits(run_dir: Path) -> None:
    started(run_dir)
    append_event(run_dir, END, step=20, reason="stopped by signal SIGUSR1", completed=False, failed=False)
    (run_dir / "successor.json").write_text('{"job_id": "8", "after": "7"}')
    assert status(run_dir, job_8="PENDING").why == "job 8 is pending"


def test_a_job_that_was_submitted_waits(run_dir: Path, tmp_path: Path) -> None:
    (new := tmp_path / "new").mkdir()
    (new / "submitted.json").write_text('{"job_id": "9"}')
    assert (status(new).state, status(new, job_9="PENDING").state) == ("never started", "queued")
    started(run_dir)
    append_event(run_dir, REQUEUE, attempt=ATTEMPT, job_id="7", why="SIGTERM", how="job 9 follows this one")
    (run_dir / "submitted.json").write_text('{"job_id": "9"}')
    assert status(run_dir, job_7="COMPLETED", job_9="PENDING").state == "queued"


def test_a_start_that_was_refused(run_dir: Path) -> None:
    started(run_dir)
    append_event(run_dir, END, step=20, reason="stopped by signal SIGTERM", completed=False, failed=False)
    folder = run_dir / "attempts" / "by-hand"
    write_record(folder, FailureRecord(time.time() + 5, 0, "n1", 2, "RunLockedError", "in use by process 5"))
    assert status(run_dir).state == "stopped"
    write_record(folder, FailureRecord(time.time() + 5, 0, "n1", 2, "CheckpointError", "training.seed: 1 became 2"))
    found = status(run_dir)
    assert (found.state, found.why) == ("failed", "rank 0 on n1: CheckpointError: training.seed: 1 became 2")


def test_a_killed_start_says_so(run_dir: Path) -> None:
    started(run_dir)
    started(run_dir, step=10, attempt="job-7-1-0")
    found = status(run_dir)
    assert found.state == "failed" and found.restarts == 1
    assert found.ends == ["ended without a record (killed, or its node was lost)"] * 2


def test_counts(run_dir: Path) -> None:
    started(run_dir)
    for event in (SKIP, SKIP, ROLLBACK, SAVE_FAILED):
        append_event(run_dir, event, step=3, why="x")
    found = status(run_dir)
    assert (found.skips, found.rollbacks, found.failed_saves) == (2, 1, 1)
    assert "2, 1 back" in table([found])[1] and "1 checkpoint could not be written" in remarks([found])[-1]


def test_nothing_there(tmp_path: Path) -> None:
    assert status(tmp_path / "nowhere").state == "no such folder"
    assert status(tmp_path).state == "never started"
    (tmp_path / "attempts").mkdir()
    assert status(tmp_path).state == "never started"


def test_a_folder_with_checkpoints_alone_is_stopped(tmp_path: Path) -> None:
    assert status(make_run(tmp_path / "a")).state == "stopped"


# Damage


def test_a_damaged_checkpoint_is_named(run_dir: Path) -> None:
    (run_dir / CHECKPOINTS_DIR / step_name(20) / "weights-00000.safetensors").write_bytes(b"short")
    found = status(run_dir)
    assert checkpoint_cell(found) == "20, damaged"
    assert "weights-00000.safetensors: 5 bytes, the manifest says 100" in remarks([found])[0]
    (run_dir / CHECKPOINTS_DIR / step_name(20) / "manifest.json").unlink()
    assert checkpoint_cell(status(run_dir)) == "20, damaged"


def test_damaged_files_are_one_word_in_their_cell(run_dir: Path) -> None:
    for name in ("metrics.jsonl", "config.yaml", LOCK_NAME, HISTORY_NAME):
        (run_dir / name).write_bytes(b"\x00\xff garbage {")
    found = status(run_dir)
    assert found.damaged == dict.fromkeys(("lock.json", "config.yaml", "metrics.jsonl"), "damaged")
    assert table([found])[1].split()[:4] == [str(run_dir), "stopped", "damaged", "damaged"]


def test_a_torn_last_line_is_passed_over(run_dir: Path) -> None:
    with open(run_dir / "metrics.jsonl", "a") as handle:
        handle.write('{"step": 21, "lo')
    assert status(run_dir).step == 20


def test_files_that_never_end_are_not_waited_for(run_dir: Path) -> None:
    started(run_dir)
    for name in ("metrics.jsonl", "config.yaml", LOCK_NAME, HISTORY_NAME, "successor.json"):
        (run_dir / name).unlink(missing_ok=True)
        os.mkfifo(run_dir / name)
    (run_dir / "attempts" / ATTEMPT).mkdir(parents=True)
    os.mkfifo(run_dir / "attempts" / ATTEMPT / "start.json")
    os.mkfifo(run_dir / "attempts" / ATTEMPT / "rank-00000.json")
    assert status(run_dir).damaged == {
        "lock.json": "not a regular file", "config.yaml": "not a regular file", "metrics.jsonl": "not a regular file"
    }  # fmt: skip


def test_any_damage(tmp_path: Path) -> None:
    """Every file of a run cut off, flipped, emptied, removed or made a folder: always a status, never an exception."""
    made = make_run(tmp_path / "run")
    started(made)
    append_event(made, FAILURE, why="x", attempt=ATTEMPT, job_id="7")
    append_event(made, END, step=20, reason="r", completed=False, failed=True)
    write_record(made / "attempts" / ATTEMPT, FailureRecord(time.time(), 1, "n2", 4, "Hang", "m"))
    leave_lock(made, age_s=10)
    (made / "successor.json").write_text('{"job_id": "8", "after": "7"}')
    begin(made, ATTEMPT, "7", "7", "n[1-2]")
    files = sorted(path for path in made.rglob("*") if path.is_file())
    whole = {path: path.read_bytes() for path in files}
    drawn = random.Random(5)
    for path in files:
        for _ in range(40):
            damage(path, whole[path], drawn)
            status(made, job_7="RUNNING")
        path.unlink()
        status(made)
        path.mkdir()
        status(made, job_8="PENDING")
        path.rmdir()
        path.write_bytes(whole[path])


def damage(path: Path, whole: bytes, drawn: random.Random) -> None:
    data = bytearray(whole)
    kind = drawn.randrange(4)
    if kind == 0:
        data = data[: drawn.randrange(len(data))]
    elif kind == 1:
        for _ in range(drawn.randint(1, 5)):
            data[drawn.randrange(len(data))] = drawn.randrange(256)
    elif kind == 2:
        # Another type where a number or a text stood.
        words = [b"null", b"[]", b"{}", b'"x"', b"-1", b"1e400", b"true"]
        at = drawn.randrange(len(data))
        data[at : at + drawn.randint(1, 4)] = drawn.choice(words)
    else:
        data = bytearray(whole.replace(b": 20", b': "x"').replace(b"1", drawn.choice([b"null", b"NaN", b"[1]"])))
    path.write_bytes(bytes(data))


# The end of a large file


# The tool
