"""The end of a rank with an error: one clear message, an exit status, and RUN/attempts/ATTEMPT/rank-00003.json."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import os
import re
import socket
import sys
import time
import traceback
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ctxlm_ds import errors
from ctxlm_ds.atomic import read_object, write_text
from ctxlm_ds.console import logger
from ctxlm_ds.process.launch import RankInfo
from ctxlm_ds.process.run_files import say, update_status
from ctxlm_ds.process.run_history import attempt_folder
from ctxlm_ds.process.signals import StopSignal

EXIT_INTERRUPTED = 130
NODE = -1
RANK_0_WAIT_S, POLL_S = 10.0, 0.5
TEARDOWN_S, INTERRUPTED_TEARDOWN_S = 60.0, 3.0
SHOWN_CHARACTERS = 300
DISK_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
LOST_TYPES = ("ConnectionResetError", "BrokenPipeError")
LOST_MESSAGES = re.compile(  # of gloo, NCCL and torch's store about a peer that has ended
    r"connection (was )?(closed|reset) by|connection reset|broken pipe|socket closed|got 0 bytes"
    r"|timed out waiting \d+\s*ms for|application timeout caused pair closure|wait timeout"
    r"|waiting for clients|client socket has timed out|connect timeout|no route to host"
    r"|ncclremoteerror|remote process exited|communicator was aborted|collective operation timeout",
    re.IGNORECASE,
)
OWN_MESSAGES = re.compile(r"address already in use|failed to (bind|listen)", re.IGNORECASE)
_SOURCE_PLACE = re.compile(r"\[\S+:\d+\] ")


@dataclass(frozen=True)
class FailureRecord:
    """The end of one rank, by what it left or by what its launcher says."""

    time_unix_s: float
    rank: int  # NODE if the node itself failed
    host: str
    exit_status: int
    error: str  # the exception's type
    message: str
    traceback: str | None = None  # None for a user's mistake
    consequence: bool = False  # True if another rank's end is the reason for this one
    signal: int | None = None  # that ended it

    def describe(self) -> str:
        """Describe rank, host and error in one line, a user's mistake by all its lines."""
        if self.rank == NODE:
            return f"node {self.host} failed"
        what = ": ".join(str(part).strip() for part in (self.error, self.message) if part)
        text = f"rank {self.rank} on {self.host}{' ' if self.signal else ': '}{what}"
        return shortened(text) if self.traceback else text


def shortened(text: str) -> str:
    """Shorten an error's message to one line, without the C++ source line that torch's begin with."""
    line = _SOURCE_PLACE.sub("", " ".join(text.split()))
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…"


def read_failures(folder: Path) -> list[FailureRecord]:
    """Read the intact records of one attempt, the likely reason first: causes before consequences, each by time."""
    records = filter(None, map(read_record, sorted(folder.glob("rank-*.json"))))
    return sorted(records, key=lambda record: (record.consequence, record.time_unix_s))


def read_record(path: Path) -> FailureRecord | None:
    """Read one record; None if it is missing or damaged."""
    values, known = read_object(path) or {}, {field.name for field in fields(FailureRecord)}
    with contextlib.suppress(ValueError, TypeError):
        record = FailureRecord(**{name: value for name, value in values.items() if name in known})
        return record if float(record.time_unix_s) >= 0 else None
    return None


def write_record(folder: Path, record: FailureRecord) -> None:
    """Write a record, and the run's status if it is rank 0's or of a hang, unless the disk is full or missing."""
    with contextlib.suppress(OSError):
        write_text(folder / f"rank-{record.rank:05d}.json", json.dumps(asdict(record), indent=1) + "\n")
        # The refusal of a second process is no failure of the run.
        if (record.rank == 0 or record.exit_status == errors.EXIT_HANG) and record.error != "RunLockedError":
            why = read_failures(folder)[0].describe()
            state = "stopped" if record.exit_status == EXIT_INTERRUPTED else "failed"
            update_status(folder.parent.parent, state=state, why=why, left_s=None, last_failure=why)


class FailureReport:
    """Reports the error that ends this rank; `ranks` and `run_dir` are set as soon as they are known."""

    def __init__(self, stop_signal: StopSignal) -> None:
        self.ranks: RankInfo | None = None
        self.run_dir: Path | None = None
        self._stop_signal = stop_signal
        self._started_unix_s = time.time()

    @property
    def rank(self) -> int:
        """This process's rank, from the launcher's variables while `ranks` is not set."""
        text = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
        return self.ranks.rank if self.ranks is not None else int(text) if text.isdigit() else 0

    def end(self, error: BaseException) -> int:
        """Report an exception that ends the process, and return the exit status."""
        self._stop_signal.starting = False
        stopping = self._stop_signal.requested
        # Process groups may wait for peers that have ended. The file stays open: the timer writes there from C.
        nowhere: Any = open(os.devnull, "w")  # noqa: SIM115
        limit_s = INTERRUPTED_TEARDOWN_S if isinstance(error, KeyboardInterrupt) else TEARDOWN_S
        faulthandler.dump_traceback_later(limit_s, exit=True, file=nowhere)
        lines = None if is_users(error) else "".join(traceback.format_exception(error))
        record = FailureRecord(
            round(time.time(), 6), self.rank, socket.gethostname(), exit_status(error), type(error).__name__,
            _message(error), lines, is_consequence(error),
        )  # fmt: skip
        # A start that failed must not make a run directory.
        folder = attempt_folder(self.run_dir) if self.run_dir is not None and self.run_dir.is_dir() else None
        if is_users(error) and record.rank != 0 and self._rank_0_says_so(record, folder):
            return record.exit_status
        # A launcher that asks to stop from here on does so because of this error.
        self._stop_signal.requested = True
        if folder is not None:
            write_record(folder, record)
        if not (stopping and record.consequence):
            self._say(record, error)
        return record.exit_status

    def _rank_0_says_so(self, record: FailureRecord, folder: Path | None) -> bool:
        """Return whether rank 0 ends with the same message: by its record, or because the launcher stops this rank."""
        stopped_before, deadline_s = self._stop_signal.requested, time.monotonic() + RANK_0_WAIT_S
        while time.monotonic() < deadline_s:
            if self._stop_signal.requested and not stopped_before:
                return True
            other = None if folder is None else read_record(folder / "rank-00000.json")
            if other is not None and other.time_unix_s >= self._started_unix_s - RANK_0_WAIT_S:
                return (other.error, other.message) == (record.error, record.message)
            time.sleep(min(POLL_S, RANK_0_WAIT_S / 10))
        return False

    def _say(self, record: FailureRecord, error: BaseException) -> None:
        if is_users(error):
            logger.error("error: %s", record.message)
            return
        lines = (record.traceback or record.message).rstrip().splitlines()
        if isinstance(error, KeyboardInterrupt):
            if record.rank != 0 or self._stop_signal.name not in (None, "SIGINT"):
                return
            lines = ["interrupted"]
        elif record.consequence:
            how = "stops with another rank" if errors.is_from_another_rank(error) else "lost the others"
            lines = [f"{how}: {shortened(f'{record.error}: {record.message}')}"]
        alone = self.ranks is None or self.ranks.world_size == 1 or isinstance(error, KeyboardInterrupt)
        sys.stdout.flush()
        sys.stderr.flush()
        say("\n".join(line if alone else f"[rank {record.rank}] {line}" for line in lines))


def is_users(error: BaseException) -> bool:
    """Return whether the message alone says what to fix."""
    return isinstance(error, errors.CtxlmError) or (isinstance(error, OSError) and error.errno in DISK_ERRORS)


def is_consequence(error: BaseException | None) -> bool:
    """Return whether another rank's end is the reason: a lost connection, or an exception that was sent here."""
    if error is None or isinstance(error, errors.CtxlmError):
        return False
    is_lost = type(error).__name__ in LOST_TYPES or LOST_MESSAGES.search(str(error))
    lost = bool(is_lost) and not OWN_MESSAGES.search(str(error))
    return lost or errors.is_from_another_rank(error) or is_consequence(error.__cause__)


def exit_status(error: BaseException) -> int:
    """Return the process's exit status for an exception (errors.py)."""
    if isinstance(error, (errors.TrainingError, KeyboardInterrupt)):
        return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else errors.EXIT_TRAINING_ERROR
    return errors.EXIT_USER_ERROR if is_users(error) else errors.EXIT_UNEXPECTED


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and is_users(error):
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where} (on {socket.gethostname()})"
    return "stopped by Ctrl-C" if isinstance(error, KeyboardInterrupt) else str(error)
