"""The end of a rank with an error: one clear message, an exit status, and RUN/attempts/ATTEMPT/rank-00003.json."""

from __future__ import annotations

import errno
import faulthandler
import logging
import os
import re
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ctxlm_ds.errors import (
    EXIT_TRAINING_ERROR,
    EXIT_UNEXPECTED,
    EXIT_USER_ERROR,
    CtxlmError,
    TrainingError,
    is_from_another_rank,
)
from ctxlm_ds.process.launch import RankInfo, StopSignal
from ctxlm_ds.process.output_log import say
from ctxlm_ds.process.run_history import (
    FailureRecord,
    attempt_folder,
    read_record,
    record_name,
    shortened,
    write_record,
)

logger = logging.getLogger("ctxlm_ds")

EXIT_INTERRUPTED = 130
RANK_0_WAIT_S = 10.0
FIRST_POLL_S = 0.1
POLL_GROWTH = 2.0
TEARDOWN_S = 60.0
INTERRUPTED_TEARDOWN_S = 3.0

DISK_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
LOST_TYPES = ("ConnectionResetError", "BrokenPipeError")
LOST_MESSAGES = re.compile(
    r"connection (was )?(closed|reset) by|connection reset|broken pipe|socket closed|got 0 bytes"
    r"|timed out waiting \d+\s*ms for|application timeout caused pair closure|wait timeout"
    r"|waiting for clients|client socket has timed out|connect timeout|no route to host"
    r"|ncclremoteerror|remote process exited|communicator was aborted|collective operation timeout",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL and torch's store about a peer that has ended."""
OWN_MESSAGES = re.compile(r"address already in use|failed to (bind|listen)", re.IGNORECASE)


class FailureReport:
    """Reports the error that ends this rank.

    `ranks` and `run_dir` are set as soon as they are known. Without `ranks` the launcher's variables say which rank
    this is; without `run_dir` no record is written.
    """

    def __init__(self, stop_signal: StopSignal) -> None:
        self.ranks: RankInfo | None = None
        self.run_dir: Path | None = None
        self._stop_signal = stop_signal
        self._started_unix_s = time.time()

    def end(self, error: BaseException) -> int:
        """Report an exception that ends the process, and return the exit status."""
        self._stop_signal.starting = False
        stopping = self._stop_signal.requested
        # Process groups may wait for peers that have ended. The file stays open: the timer writes there from C.
        nowhere: Any = open(os.devnull, "w")  # noqa: SIM115
        limit_s = INTERRUPTED_TEARDOWN_S if isinstance(error, KeyboardInterrupt) else TEARDOWN_S
        faulthandler.dump_traceback_later(limit_s, exit=True, file=nowhere)
        record = FailureRecord(
            time_unix_s=round(time.time(), 6),
            rank=self.rank,
            host=socket.gethostname(),
            exit_status=exit_status(error),
            error=type(error).__name__,
            message=_message(error),
            traceback=None if is_users(error) else "".join(traceback.format_exception(error)),
            consequence=is_consequence(error),
        )
        if is_users(error) and record.rank != 0 and self._rank_0_says_so(record):
            return record.exit_status
        # A launcher that asks to stop from here on does so because of this error.
        self._stop_signal.requested = True
        folder = self._folder()
        if folder is not None:
            write_record(folder, record)
        if not (stopping and record.consequence):
            self._say(record, error)
        return record.exit_status

    @property
    def rank(self) -> int:
        """This process's rank, from the launcher's variables while `ranks` is not set."""
        if self.ranks is not None:
            return self.ranks.rank
        text = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
        return int(text) if text.isdigit() else 0

    def _folder(self) -> Path | None:
        """Return the folder of records; None without a run directory (a start that failed must not make one)."""
        return attempt_folder(self.run_dir) if self.run_dir is not None and self.run_dir.is_dir() else None

    def _rank_0_says_so(self, record: FailureRecord) -> bool:
        """Return whether rank 0 ends with the same message, so that this rank need not repeat it.

        Either its record shows that, or the launcher, which stops the others when a rank has failed. Neither comes for
        a mistake that only this rank can see (a file missing on its node).
        """
        stopped_before = self._stop_signal.requested
        deadline_s, poll_s = time.monotonic() + RANK_0_WAIT_S, FIRST_POLL_S
        while time.monotonic() < deadline_s:
            if self._stop_signal.requested and not stopped_before:
                return True
            folder = self._folder()
            other = None if folder is None else read_record(folder / record_name(0))
            if other is not None and other.time_unix_s >= self._started_unix_s - RANK_0_WAIT_S:
                return (other.error, other.message) == (record.error, record.message)
            # Many ranks ask one file server: a record that is not there soon comes late.
            time.sleep(min(poll_s, max(0.0, deadline_s - time.monotonic())))
            poll_s *= POLL_GROWTH
        return False

    def _say(self, record: FailureRecord, error: BaseException) -> None:
        if is_users(error):
            logger.error("error: %s", record.message)
            return
        alone = self.ranks is None or self.ranks.world_size == 1
        tag = "" if alone else f"[rank {record.rank}] "
        if isinstance(error, KeyboardInterrupt):
            if record.rank != 0 or self._stop_signal.name not in (None, "SIGINT"):
                return
            text = "interrupted"
        elif record.consequence:
            how = "stops with another rank" if is_from_another_rank(error) else "lost the others"
            text = f"{tag}{how}: {shortened(f'{record.error}: {record.message}')}"
        else:
            lines = (record.traceback or record.message).rstrip().splitlines()
            text = "\n".join(f"{tag}{line}" for line in lines)
        sys.stdout.flush()
        sys.stderr.flush()
        say(text)


def is_users(error: BaseException) -> bool:
    """Return whether the message alone says what to fix."""
    return isinstance(error, CtxlmError) or (isinstance(error, OSError) and error.errno in DISK_ERRORS)


def is_consequence(error: BaseException) -> bool:
    """Return whether another rank's end is the reason: a lost connection, or an exception that was sent here."""
    if isinstance(error, CtxlmError):
        return False
    if is_from_another_rank(error):
        return True
    link: BaseException | None = error
    while link is not None:
        text = str(link)
        if (type(link).__name__ in LOST_TYPES or LOST_MESSAGES.search(text)) and not OWN_MESSAGES.search(text):
            return True
        link = link.__cause__
    return False


def exit_status(error: BaseException) -> int:
    """Return the process's exit status for an exception (errors.py)."""
    if isinstance(error, TrainingError):
        return EXIT_TRAINING_ERROR
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return EXIT_USER_ERROR if is_users(error) else EXIT_UNEXPECTED


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C"
    if isinstance(error, OSError) and is_users(error):
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where} (on {socket.gethostname()})"
    return str(error)
