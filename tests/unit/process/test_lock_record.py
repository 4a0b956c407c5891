"""The record of a lock's holder: its machine, its process, its place in a line of jobs, and damaged files."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from ctxlm_ds.process.lock_record import LockRecord, look_at_lock, process_fields, process_start_ticks, this_process


def record(**changes: object) -> LockRecord:
    return dataclasses.replace(this_process(), **changes)


def write(path: Path, holder: LockRecord, **changes: object) -> Path:
    path.write_text(json.dumps(dataclasses.asdict(holder) | changes))
    return path


def test_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(name, value)
    mine = this_process()
    assert (mine.pid, mine.job_id, mine.restart_count) == (os.getpid(), "8", 2)
    assert mine.describe() == f"process {os.getpid()} on {mine.host} (Slurm job 8)"
    assert not mine.has_ended() and mine.token != this_process().token


def test_a_process_is_told_from_a_later_one_of_its_number() -> None:
    mine = this_process()
    assert record(process_start_ticks=mine.process_start_ticks - 1).has_ended()
    # A zombie (not waited for) has ended, and the name of its program may hold what separates fields.
    process = subprocess.Popen(["bash", "-c", "exec -a 'a) b (' sleep 60"])
    while not (started := process_start_ticks(process.pid)):
        time.sleep(0.01)
    running = record(pid=process.pid, process_start_ticks=started)
    assert not running.has_ended() and process_fields(process.pid)[0] in "RSD"
    process.kill()
    while process_fields(process.pid):
        time.sleep(0.01)
    assert running.has_ended()
    process.wait()
    assert running.has_ended()


@pytest.mark.parametrize("change", [{"boot_id": "another"}, {"pid_namespace": "pid:[1]"}, {"host": "other"}])
def test_machines_are_told_by_host_boot_and_process_table(change: dict[str, str]) -> None:
    assert record().same_machine(this_process())
    assert not record(**change).same_machine(this_process())
    unknown = record(**dict.fromkeys(change, ""))
    assert not unknown.same_machine(unknown), "what cannot be read proves nothing"


@pytest.mark.parametrize(
    ("other", "succeeds"),
    [
        ({"job_id": "7", "restart_count": 2}, True),
        ({"job_id": "7", "restart_count": 1}, False),
        ({"job_id": "8", "restart_count": 9}, False),
        ({"job_id": None, "restart_count": 0}, False),
    ],
)
def test_a_later_start_of_the_same_job_succeeds(other: dict[str, object], succeeds: bool) -> None:
    assert record(job_id="7", restart_count=1).is_succeeded_by(record(**other)) is succeeds
    assert not record(job_id=None).is_succeeded_by(record(**other))


def test_a_look_at_a_lock(tmp_path: Path) -> None:
    assert look_at_lock(tmp_path / "lock.json") is None
    holder = this_process()
    path = write(tmp_path / "lock.json", holder, chain="of an earlier version")
    os.utime(path, (time.time() - 50,) * 2)
    seen = look_at_lock(path)
    assert seen is not None and seen.record == holder and 49 < seen.age_s < 60


@pytest.mark.parametrize(
    "changes",
    [{"pid": "5"}, {"job_id": 7}, {"restart_count": None}, {"acquired_unix_s": []}],
)
def test_a_record_with_a_wrong_value_is_none(tmp_path: Path, changes: dict[str, object]) -> None:
    seen = look_at_lock(write(tmp_path / "lock.json", this_process(), **changes))
    assert seen is not None and seen.record is None


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 100_000, "\x00\xff"])
def test_a_file_that_is_no_record(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock.json").write_bytes(content.encode("latin-1"))
    seen = look_at_lock(tmp_path / "lock.json")
    assert seen is not None and seen.record is None and seen.age_s < 60
