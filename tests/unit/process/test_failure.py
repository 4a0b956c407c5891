"""Who speaks when ranks end with an error, what is written, and the exit statuses."""

from __future__ import annotations

import errno
import faulthandler
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ctxlm_ds.console import setup_logging
from ctxlm_ds.errors import CheckpointError, ConfigError, TrainingError
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.process import failure
from ctxlm_ds.process.failure import (
    FailureRecord,
    FailureReport,
    exit_status,
    is_consequence,
    read_failures,
    write_record,
)
from ctxlm_ds.process.launch import RankInfo
from ctxlm_ds.process.signals import StopSignal

GLOO = "[/x/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:12513: Connection reset by peer. This is typical"


@pytest.fixture(autouse=True)
def no_bounded_teardown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process that runs the tests goes on."""
    monkeypatch.setattr(failure, "RANK_0_WAIT_S", 0.3)
    yield
    faulthandler.cancel_dump_traceback_later()


def report(run_dir: Path | None, rank: int = 0, world_size: int = 4) -> FailureReport:
    setup_logging(rank)
    made = FailureReport(StopSignal())
    made.ranks = RankInfo(rank, world_size, rank, world_size, "127.0.0.1", 1, "environment", 0)
    made.run_dir = run_dir
    return made


def records(run_dir: Path) -> list[FailureRecord]:
    return read_failures(run_dir / "attempts" / "by-hand")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_rank_0_tells_a_users_error_in_one_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert report(tmp_path).end(raised(ConfigError("a is 1; set it to 2"))) == 2
    assert capfd.readouterr().err.endswith(" error: a is 1; set it to 2\n")
    (record,) = records(tmp_path)
    assert (record.rank, record.exit_status, record.error, record.traceback) == (0, 2, "ConfigError", None)


def test_other_ranks_are_silent_where_rank_0_says_the_same(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    error = raised(CheckpointError("disk full"))
    report(tmp_path).end(error)
    capfd.readouterr()
    assert report(tmp_path, rank=3).end(error) == 2
    assert capfd.readouterr().err == "" and [record.rank for record in records(tmp_path)] == [0]
    assert report(tmp_path, rank=3).end(raised(CheckpointError("another"))) == 2
    assert "[rank 3] error: another" in capfd.readouterr().err and len(records(tmp_path)) == 2


def test_a_rank_that_is_stopped_meanwhile_leaves_the_word_to_rank_0(capfd: pytest.CaptureFixture[str]) -> None:
    made = report(None, rank=1)
    made._stop_signal = stopping_later(made._stop_signal)
    assert made.end(raised(ConfigError("wrong"))) == 2
    assert capfd.readouterr().err == ""


def stopping_later(signal: StopSignal) -> StopSignal:
    """As a launcher does it: after the first look."""

    class Later(StopSignal):
        looks = 0

        @property  # type: ignore[override]
        def requested(self) -> bool:
            self.looks += 1
            return self.looks > 2

        @requested.setter
        def requested(self, value: bool) -> None:
            pass

    return Later()


def test_a_users_error_that_only_one_rank_sees_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The record of an earlier start, whatever it says, is not rank 0's word on this one."""
    old = FailureRecord(time.time() - 3600, 0, "n1", 2, "ConfigError", "no such file on n2")
    write_record(tmp_path / "attempts" / "by-hand", old)
    assert report(tmp_path, rank=2).end(raised(ConfigError("no such file on n2"))) == 2
    assert "[rank 2] error: no such file on n2" in capfd.readouterr().err


def test_no_run_directory_no_record(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert report(tmp_path / "run").end(raised(ValueError("x"))) == 1
    assert list(tmp_path.iterdir()) == []
    assert "ValueError: x" in capfd.readouterr().err


def test_a_bug_shows_its_traceback_tagged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert report(tmp_path, rank=2).end(raised(KeyError("bug"))) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "[rank 2] Traceback (most recent call last):" and lines[-1] == "[rank 2] KeyError: 'bug'"
    assert all(line.startswith("[rank 2] ") for line in lines)
    assert "KeyError: 'bug'" in str(records(tmp_path)[0].traceback)
    report(tmp_path, world_size=1).end(raised(KeyError("bug")))
    assert capfd.readouterr().err.startswith("Traceback")


def test_a_lost_peer_is_one_line_and_no_cause(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report(tmp_path, rank=0).end(raised(RuntimeError(GLOO)))
    said = capfd.readouterr().err
    assert said.startswith("[rank 0] lost the others: RuntimeError: Read error [127.0.0.1]") and said.count("\n") == 1
    report(tmp_path, rank=1).end(raised(ValueError("the reason")))
    first, second = records(tmp_path)
    assert (first.rank, first.consequence, second.rank, second.consequence) == (1, False, 0, True)
    assert "RuntimeError" in str(second.traceback)


@pytest.mark.parametrize(
    "message",
    [
        GLOO,
        "[pair.cc:553] Connection closed by peer [10.0.0.2]:21181. This is typically caused by a crash",
        "[unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete",
        "failed to recv, got 0 bytes",
        "Timed out after 1801 seconds waiting for clients. 1/2 clients joined.",
        "NCCL error in: x.cpp:3356, ncclRemoteError: A call failed possibly due to a network error or a remote process",
    ],
)
def test_how_libraries_say_that_a_peer_is_gone(message: str) -> None:
    assert is_consequence(RuntimeError(message))


def test_what_is_this_ranks_own() -> None:
    assert not is_consequence(RuntimeError("The server socket has failed to bind. EADDRINUSE, address already in use"))
    assert not is_consequence(RuntimeError("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO)"))
    assert not is_consequence(ValueError("shape mismatch"))
    assert not is_consequence(ConfigError("the port is wrong: connection reset by peer"))


def test_an_exception_that_travelled_is_a_consequence() -> None:
    """What run_together raises on the ranks where nothing went wrong."""

    class Pair(Topology):
        def all_reduce_max(self, values: Sequence[float]) -> list[float]:
            return [1.0 for _ in values]

        def all_gather_object(self, value: object) -> list[object]:  # type: ignore[override]
            return [value, OSError("boom")]

    with pytest.raises(OSError, match="boom") as caught:
        Pair(rank=0, world_size=2).run_together(lambda: None)
    assert is_consequence(caught.value)
    with pytest.raises(ValueError, match="own") as own:
        Pair(rank=0, world_size=2).run_together(lambda: (_ for _ in ()).throw(ValueError("own")))
    assert not is_consequence(own.value)


def test_exit_statuses() -> None:
    assert exit_status(TrainingError("NaN")) == 3
    assert exit_status(CheckpointError("damaged")) == 2
    assert exit_status(OSError(errno.EROFS, "Read-only file system", "/x")) == 2
    assert exit_status(OSError(errno.EIO, "Input/output error")) == 1
    assert exit_status(KeyboardInterrupt()) == 130


def test_a_read_only_disk_is_told_without_a_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report(tmp_path).end(raised(OSError(errno.EROFS, "Read-only file system", "/x/y")))
    assert "error: Read-only file system: /x/y (on " in capfd.readouterr().err


def test_damaged_records_are_passed_over(tmp_path: Path) -> None:
    write_record(tmp_path, FailureRecord(2.0, 1, "n1", 1, "E", "m"))
    for rank, text in enumerate(["", "[]", "{}", '{"time_unix_s": "x", "rank": 0}'], 2):
        (tmp_path / f"rank-{rank:05d}.json").write_text(text)
    newer = {**json.loads((tmp_path / "rank-00001.json").read_text()), "of a later version": 1, "rank": 9}
    (tmp_path / "rank-00009.json").write_text(json.dumps(newer))
    assert [record.rank for record in read_failures(tmp_path)] == [1, 9]
    assert read_failures(tmp_path / "nowhere") == []
