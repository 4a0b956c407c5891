"""The status of runs: each state, the figures, and folders with any file damaged or missing."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.cluster.run_status import RunStatus, details, find_runs, read_statuses, remarks, show
from ctxlm_ds.apps.cluster.slurm_commands import NEXT_TASK
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, step_name
from ctxlm_ds.checkpoint.manifest import hash_files, write_manifest
from ctxlm_ds.process.run_files import update_status
from ctxlm_ds.process.run_lock import LOCK_NAME, RunLock, this_process


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run in the middle, with a checkpoint."""
    run_dir = tmp_path / "run"
    folder = run_dir / CHECKPOINTS_DIR / step_name(20)
    folder.mkdir(parents=True)
    (folder / "weights-00000.safetensors").write_bytes(b"x" * 100)
    write_manifest(folder, 20, hash_files(folder, ["weights-00000.safetensors"]))
    update_status(
        run_dir, state="running", step=20, of=100, loss=6.8, tokens_per_second=999.4, left_s=80.0, starts=2, skipped=1,
        rollbacks=0, checkpoint=str(folder), job_id="7", log="/logs/7.log", last_failure="rank 1 on n2 was killed",
    )  # fmt: skip
    return run_dir


def status(run_dir: Path, **queue: str) -> RunStatus:
    (found,) = read_statuses([run_dir], {name.removeprefix("job_"): state for name, state in queue.items()})
    # Whatever it is, it can be shown.
    assert details(found) and isinstance(remarks(found), list) and json.dumps(vars(found))
    return found


def leave_lock(run_dir: Path, age_s: float, **changes: Any) -> None:
    """A lock that nobody holds any more."""
    record = {**vars(this_process()), "host": "elsewhere", "job_id": "7", **changes}
    (run_dir / LOCK_NAME).write_text(json.dumps(record))
    os.utime(run_dir / LOCK_NAME, (time.time() - age_s,) * 2)


def test_running(run_dir: Path) -> None:
    with RunLock(run_dir).acquire():
        found = status(run_dir)
        update_status(run_dir, state="starting")
        assert status(run_dir).state == "starting"
    assert (found.state, found.why, found.job_id, found.log) == ("running", None, "7", "/logs/7.log")
    assert (found.step, found.of, found.loss, found.restarts, found.skipped) == (20, 100, 6.8, 1, 1)
    assert found.checkpoint == step_name(20) and found.checkpoint_problem is None
    text = "\n".join(details(found))
    assert "20/100" in text and "1:20" in text and "20, 0:0" in text and "rank 1 on n2 was killed" in text


@pytest.mark.parametrize(
    ("state", "queue", "expected"),
    [
        ("running", {"job_7": "PENDING"}, "queued"),
        ("running", {"job_7": "RUNNING"}, "restarting"),
        ("failed", {"job_7": "RUNNING"}, "restarting"),
        ("running", {}, "stale"),
        ("queued", {"job_7": "PENDING"}, "queued"),
        ("queued", {}, "queued"),
        ("queued", {"job_9": "RUNNING"}, "stopped"),
        ("queued", {"job_7": "CANCELLED"}, "stopped"),
        ("failed", {}, "failed"),
        ("completed", {"job_7": "COMPLETING"}, "completed"),
        ("stopped", {"job_7": "COMPLETED"}, "stopped"),
    ],
)
def test_a_run_that_no_process_holds(run_dir: Path, state: str, queue: dict[str, str], expected: str) -> None:
    update_status(run_dir, state=state, why="the reason")
    assert status(run_dir, **queue).state == expected


def test_a_run_between_two_tasks_of_an_array_waits(run_dir: Path) -> None:
    """Slurm knows the task that has ended; the next one may not have begun."""
    update_status(run_dir, state="queued", why=f"{NEXT_TASK}: stopped by signal SIGUSR1")
    assert status(run_dir, job_7="COMPLETED").state == "queued"


def test_a_lost_process_is_stale(run_dir: Path) -> None:
    leave_lock(run_dir, 300)
    found = status(run_dir)
    assert found.state == "stale" and "no heartbeat of process" in str(found.why) and "5 minutes" in str(found.why)
    leave_lock(run_dir, 5, host=this_process().host, pid=2**22 + 5)
    assert "has ended and recorded no reason" in str(status(run_dir).why)


def test_runs_that_have_not_begun(tmp_path: Path) -> None:
    assert status(tmp_path / "none").state == "no such folder"
    (tmp_path / "empty").mkdir()
    assert status(tmp_path / "empty").state == "never started"
    (tmp_path / "empty" / "history.jsonl").write_text("")
    assert status(tmp_path / "empty").state == "no status.json"
    update_status(tmp_path / "empty", submitted="12")
    assert status(tmp_path / "empty", job_12="PENDING").state == "queued"
    assert status(tmp_path / "empty", job_12="RUNNING").state == "starting"


def test_a_damaged_checkpoint_is_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    next(run_dir.glob("checkpoints/*/*.safetensors")).write_bytes(b"x")
    found = status(run_dir)
    assert found.checkpoint_problem is not None
    show([found, found], as_json=False)
    printed = capsys.readouterr().out
    assert "20, damaged" in printed and found.checkpoint_problem in printed


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"state": 5, "step": "x", "loss": [], "starts": 1e400, "checkpoint": {}, "of": true}',
             "[" * 40_000, '{"step": 1' + "0" * 400 + "}",
             '{"checkpoint": "a\\u0000b", "why": "\\u001b]0;x", "state": "a"}',
             '{"step": NaN, "left_s": -Infinity, "loss": 1e400}', "[" * 900 + "]" * 900]
)  # fmt: skip
def test_a_damaged_file_is_shown_all_the_same(run_dir: Path, text: str) -> None:
    (run_dir / "status.json").write_text(text)
    found = status(run_dir)
    assert found.step is None and "\x1b" not in f"{found}"


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        (["held: 3.40 nats", "it \x1b[31mrepeats"], ["held: 3.40 nats", "it  [31mrepeats"]),
        (None, []), ("held", []), ([1, "held"], ["held"]),
    ],
)  # fmt: skip
def test_the_verdict_is_shown(run_dir: Path, recorded: Any, shown: list[str]) -> None:
    update_status(run_dir, state="completed", verdict=recorded)
    found = status(run_dir)
    assert found.verdict == shown
    assert [line for line in details(found) if line.startswith("  verdict")] == [f"  verdict: {line}" for line in shown]


def test_a_folder_of_runs(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep" / "0").mkdir(parents=True)
    (tmp_path / "sweep" / "sweep.txt").write_text("a.b=1\n")
    (tmp_path / "other").mkdir()
    assert find_runs([str(tmp_path)]) == [run_dir]
    assert find_runs([str(tmp_path / "sweep"), str(tmp_path / "r*")]) == [tmp_path / "sweep" / "0", run_dir]
    assert find_runs([str(tmp_path / "gone")]) == [tmp_path / "gone"]
