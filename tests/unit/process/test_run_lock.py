"""The run lock between real processes: refusal, takeover, races, and hosts whose processes cannot be seen."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from ctxlm_ds.atomic import partial_path
from ctxlm_ds.errors import ConfigError, RunLockedError
from ctxlm_ds.process import run_lock
from ctxlm_ds.process.run_lock import (
    LOCK_NAME,
    RunLock,
    look_at_lock,
    make_run_dir,
    process_fields,
    process_start_ticks,
    this_process,
)

HOLDER = """
import sys, time
from ctxlm_ds.process.run_lock import RunLock
lock = RunLock(sys.argv[1], heartbeat_s=0.1).acquire()
print("held", flush=True)
sys.stdin.readline()
"""


class Holder:
    """Another process that holds the lock until it is told to leave."""

    def __init__(self, run_dir: Path, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        assert self.process.stdout is not None and self.process.stdout.readline() == "held\n"

    def leave(self) -> None:
        self.process.communicate("\n", timeout=20)

    def kill(self, reap: bool = True) -> None:
        self.process.kill()
        if reap:
            self.process.wait(timeout=20)
        else:
            while process_start_ticks(self.process.pid) is not None:
                time.sleep(0.01)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    started = Holder(tmp_path, SLURM_JOB_ID="4711")
    yield started
    started.kill()


def test_a_second_start_is_refused_and_told_by_whom(tmp_path: Path, holder: Holder) -> None:
    with pytest.raises(RunLockedError) as caught:
        RunLock(tmp_path).acquire()
    message = str(caught.value)
    assert f"process {holder.process.pid} on " in message and "Slurm job 4711" in message
    assert "stop it (scancel 4711), or choose another run_dir" in message and str(tmp_path) in message


def test_a_live_holder_is_waited_for_until_the_limit(tmp_path: Path, holder: Holder) -> None:
    start_s = time.monotonic()
    with pytest.raises(RunLockedError, match="after waiting 1 s"):
        RunLock(tmp_path).acquire(wait_s=1.0)
    assert 0.9 < time.monotonic() - start_s < 5


def test_a_waiting_start_gets_the_lock_when_the_holder_leaves(tmp_path: Path, holder: Holder) -> None:
    threading.Timer(0.5, holder.leave).start()
    with RunLock(tmp_path).acquire(wait_s=20) as lock:
        assert lock.held


@pytest.mark.parametrize("reap", [True, False])
def test_a_killed_holder_is_replaced_at_once(tmp_path: Path, holder: Holder, reap: bool) -> None:
    """Also while the dead process is still a zombie."""
    holder.kill(reap)
    start_s = time.monotonic()
    with RunLock(tmp_path).acquire() as lock:
        assert lock.held and time.monotonic() - start_s < 1
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_release_lets_the_next_one_in(tmp_path: Path) -> None:
    first = RunLock(tmp_path).acquire()
    with pytest.raises(RunLockedError):
        RunLock(tmp_path).acquire()
    first.release()
    first.release()
    assert not first.held and not (tmp_path / LOCK_NAME).exists()
    Holder(tmp_path).leave()
    first.acquire()
    first.check()
    first.release()


def test_a_forked_child_neither_holds_nor_releases(tmp_path: Path) -> None:
    with RunLock(tmp_path).acquire() as lock:
        pid = os.fork()
        if pid == 0:
            lock.release()
            os._exit(0 if not lock.held else 1)
        assert os.waitpid(pid, 0)[1] == 0
        lock.check()
        with pytest.raises(RunLockedError):
            start_another(tmp_path)


def start_another(run_dir: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HOLDER, str(run_dir)], capture_output=True, text=True, input="\n")
    if "RunLockedError" in done.stderr:
        raise RunLockedError(done.stderr)


def test_a_surviving_forked_worker_does_not_keep_a_dead_holders_lock(tmp_path: Path) -> None:
    code = HOLDER.replace('print("held"', 'import os\nif os.fork() == 0: time.sleep(30)\nprint("held"')
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        process.kill()
        process.wait()
        with RunLock(tmp_path).acquire() as lock:
            assert lock.held
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def _write_lock(run_dir: Path, age_s: float, **changes: object) -> None:
    path = run_dir / LOCK_NAME
    path.write_text(json.dumps(dataclasses.asdict(this_process()) | changes))
    os.utime(path, (time.time() - age_s,) * 2)


def _dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


ELSEWHERE = {"host": "other-node", "boot_id": "another boot", "pid": 1}


def _be_job(monkeypatch: pytest.MonkeyPatch, job: str, restart: str) -> None:
    for name, value in {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": restart}.items():
        monkeypatch.setenv(name, value)


OF_JOB_7 = {"job_id": "7", "restart_count": 1}
OTHER_TABLE = {"pid": 2**22 + 5}


@pytest.mark.parametrize(
    ("age_s", "lock", "started_as", "message"),
    [
        (1e6, {}, None, None),  # a suspended process on the same host is alive
        (5, ELSEWHERE, None, "process 1 on other-node.*last heartbeat [56] s ago"),
        *((0, ELSEWHERE | OF_JOB_7, job, None) for job in (("7", "1"), ("7", "0"), ("8", "5"))),
        # An earlier start that Slurm is about to kill is waited for; scancel 7 would end this process, too.
        (0, OF_JOB_7, ("7", "2"), r"\(Slurm job 7\).*stop it \(kill \d+ on "),
        # Containers share host names and pids; only the heartbeat counts there.
        (5, OTHER_TABLE | {"boot_id": "another"}, None, None), (5, OTHER_TABLE | {"host": "other"}, None, None),
        (5, OTHER_TABLE | {"pid_namespace": "pid:[1]"}, None, None),
    ],
)  # fmt: skip
def test_a_start_is_refused_while_the_holder_may_live(
    age_s: float, lock: dict[str, object], started_as: tuple[str, str] | None, message: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    _write_lock(tmp_path, age_s, **lock)
    if started_as:
        _be_job(monkeypatch, *started_as)
    with pytest.raises(RunLockedError, match=message):
        RunLock(tmp_path).acquire()


def test_another_host_is_replaced_when_its_heartbeat_is_old_and_stands_still(tmp_path: Path) -> None:
    _write_lock(tmp_path, 61, **ELSEWHERE)
    start_s = time.monotonic()
    with RunLock(tmp_path, heartbeat_s=0.4).acquire() as lock:
        assert lock.held
    # It was watched for one and a half heartbeats first, although no wait was allowed.
    assert 0.6 <= time.monotonic() - start_s < 5


def test_another_host_whose_clock_is_behind_is_not_robbed(tmp_path: Path) -> None:
    """Its heartbeats look an hour old, but they move."""
    _write_lock(tmp_path, 3600, **ELSEWHERE)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.05):
            os.utime(tmp_path / LOCK_NAME, (time.time() - 3600,) * 2)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RunLockedError, match="other-node"):
            RunLock(tmp_path, heartbeat_s=0.4).acquire()
    finally:
        stop.set()
        thread.join()


def test_another_host_whose_clock_is_ahead_is_replaced_after_the_limit(tmp_path: Path) -> None:
    _write_lock(tmp_path, -3600, **ELSEWHERE)
    start_s = time.monotonic()
    with RunLock(tmp_path, stale_after_s=1.0, heartbeat_s=0.2).acquire(wait_s=20) as lock:
        assert lock.held
    assert time.monotonic() - start_s >= 1.0


def test_a_job_replaces_its_own_earlier_start_on_a_lost_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeat goes on, but Slurm has given up the node it runs on; it is given the time to notice."""
    _write_lock(tmp_path, 0, **ELSEWHERE, **OF_JOB_7)
    _be_job(monkeypatch, "7", "2")
    start_s = time.monotonic()
    with RunLock(tmp_path, heartbeat_s=0.2).acquire() as lock:
        assert lock.held
    assert time.monotonic() - start_s >= 0.3


def test_a_lock_is_given_back_if_its_taking_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the earlier start is given the time to notice."""
    _write_lock(tmp_path, 0, **ELSEWHERE, **OF_JOB_7)
    _be_job(monkeypatch, "7", "2")
    lock = RunLock(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_lock.time, "sleep", Mock(side_effect=KeyboardInterrupt))
        lock.acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_something_else_in_the_locks_place_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("not a lock")
    with pytest.raises(RunLockedError, match="remove the file"):
        RunLock(tmp_path).acquire()
    assert (tmp_path / LOCK_NAME).read_text() == "not a lock"


def test_the_heartbeat_moves(tmp_path: Path) -> None:
    with RunLock(tmp_path, heartbeat_s=0.05).acquire():
        first = (tmp_path / LOCK_NAME).stat().st_mtime_ns
        deadline_s = time.monotonic() + 60
        while (tmp_path / LOCK_NAME).stat().st_mtime_ns == first:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


def test_a_removed_file_is_put_back(tmp_path: Path) -> None:
    with RunLock(tmp_path).acquire() as lock:
        (tmp_path / LOCK_NAME).unlink()
        lock.check()
        assert (tmp_path / LOCK_NAME).exists()


def test_a_holder_that_was_taken_over_notices_and_leaves_the_new_lock_alone(tmp_path: Path) -> None:
    told = threading.Event()
    lock = RunLock(tmp_path, heartbeat_s=0.05, on_loss=told.set).acquire()
    _write_lock(tmp_path, 0, token="new", pid=4242)
    assert told.wait(10) and not lock.held
    with pytest.raises(RunLockedError, match="but by process 4242 on .*; this"):
        lock.check()
    lock.release()
    assert json.loads((tmp_path / LOCK_NAME).read_text())["token"] == "new"


CONTENDERS = 8


def _contend(run_dir: Path, log: Path, die: bool) -> None:
    """Take the lock, note the moments of having and of leaving it, or die while holding it."""
    lock = RunLock(run_dir).acquire(wait_s=60)
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.write(handle, f"{time.monotonic_ns()} {os.getpid()} in\n".encode())
    time.sleep(0.02)
    os.write(handle, f"{time.monotonic_ns()} {os.getpid()} out\n".encode())
    if die:
        os.kill(os.getpid(), signal.SIGKILL)
    lock.release()


@pytest.mark.long
def test_contenders_never_hold_it_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them are killed while they hold it, so most takes are contended takeovers of a dead holder."""
    monkeypatch.setattr(run_lock, "POLL_S", 0.001)
    for round_number in range(3):
        run_dir, log = tmp_path / str(round_number), tmp_path / f"log-{round_number}"
        run_dir.mkdir()
        log.touch()
        _write_lock(run_dir, 0, pid=_dead_pid(), token="gone")
        children = []
        for number in range(CONTENDERS):
            pid = os.fork()
            if pid == 0:
                try:
                    _contend(run_dir, log, die=number % 2 == 0)
                finally:
                    os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)
        events = [line.split() for line in log.read_text().splitlines()]
        assert len(events) == 2 * CONTENDERS
        assert [kind for _, _, kind in sorted(events, key=lambda e: int(e[0]))] == ["in", "out"] * CONTENDERS
        assert not list(run_dir.glob("*.claim-*")) and not list(run_dir.glob("*.new-*"))


@pytest.mark.parametrize("claimers", [1, 3])
def test_a_claimer_that_died_during_the_takeover_does_not_block_it(tmp_path: Path, claimers: int) -> None:
    dead_pid = _dead_pid()
    token = "t0"
    _write_lock(tmp_path, 0, pid=dead_pid, token=token)
    for number in range(1, claimers + 1):
        record = dataclasses.replace(this_process(), pid=dead_pid, token=f"t{number}")
        claim = tmp_path / f"{LOCK_NAME}.claim-{token}"
        claim.write_text(json.dumps(dataclasses.asdict(record)))
        token = f"t{number}"
    with RunLock(tmp_path).acquire() as lock:
        assert lock.held
        lock.check()
    assert list(tmp_path.iterdir()) == []


def test_a_late_contender_does_not_replace_the_winner(tmp_path: Path) -> None:
    """It judged the old holder dead before the winner was done, and comes to claim after that."""
    dead_pid = _dead_pid()
    _write_lock(tmp_path, 0, pid=dead_pid, token="old")
    late = RunLock(tmp_path)
    judged = look_at_lock(tmp_path / LOCK_NAME)
    assert judged is not None and late._is_dead(judged)
    with RunLock(tmp_path).acquire() as winner:
        assert late._take_over(tmp_path / LOCK_NAME, judged) is False
        winner.check()
    assert not late.held and list(tmp_path.iterdir()) == []


def test_a_process_is_told_from_a_later_one_of_its_number() -> None:
    mine = this_process()
    assert not mine.has_ended()
    assert dataclasses.replace(mine, process_start_ticks=mine.process_start_ticks - 1).has_ended()
    # A zombie (not waited for) has ended, and the name of its program may hold what separates fields.
    process = subprocess.Popen(["bash", "-c", "exec -a 'a) b (' sleep 60"])
    while not (started := process_start_ticks(process.pid)):
        time.sleep(0.01)
    running = dataclasses.replace(mine, pid=process.pid, process_start_ticks=started)
    assert not running.has_ended() and process_fields(process.pid)[0] in "RSD"
    process.kill()
    while process_fields(process.pid):
        time.sleep(0.01)
    assert running.has_ended()
    process.wait()
    assert running.has_ended()


def test_a_look_at_a_lock(tmp_path: Path) -> None:
    assert look_at_lock(tmp_path / "lock.json") is None
    _write_lock(tmp_path, 50, chain="of an earlier version")
    seen = look_at_lock(tmp_path / "lock.json")
    assert seen is not None and seen.token and 49 < seen.age_s < 60
    assert seen.same_machine(this_process()) and seen.pid == os.getpid()
    unknown = dataclasses.replace(seen, boot_id="")
    assert not unknown.same_machine(unknown), "what cannot be read proves nothing"


WRONG_VALUES = [{"pid": "5"}, {"job_id": 7}, {"restart_count": None}, {"token": []}]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 100_000, "\x00\xff", *WRONG_VALUES])
def test_a_file_that_is_no_record(tmp_path: Path, content: str | dict[str, object]) -> None:
    if isinstance(content, str):
        (tmp_path / "lock.json").write_bytes(content.encode("latin-1"))
    else:
        _write_lock(tmp_path, 0, **content)
    seen = look_at_lock(tmp_path / "lock.json")
    assert seen is not None and not seen.token and seen.age_s < 60


@pytest.mark.parametrize("name", ["file", "file/below", "/dev/null/x", "/proc/x"])
def test_a_run_directory_that_cannot_exist_is_one_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be created: .*; set run_dir to another folder"):
        make_run_dir(tmp_path / name)


def test_files_of_killed_writers_are_removed_when_the_run_is_taken_again(tmp_path: Path) -> None:
    attempt = tmp_path / "attempts" / "by-hand"
    attempt.mkdir(parents=True)
    new = partial_path(tmp_path / "report.html")
    left = [partial_path(path) for path in (tmp_path / "status.json", attempt / "rank-0.json")]
    left.append(tmp_path / "lock.json.new-0")
    for path in (*left, new):
        path.touch()
    for path in left:
        os.utime(path, (time.time() - 2 * run_lock.LEFT_AFTER_S,) * 2)
    with RunLock(tmp_path).acquire():
        assert new.exists() and not any(path.exists() for path in left)
