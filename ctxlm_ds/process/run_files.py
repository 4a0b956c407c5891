"""Files of a run directory on a disk that may be full or unavailable for a while, which costs lines, not the run.

RUN/output.log has what rank 0 says, with dates, over all starts; RUN/status.json the run's present state.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import partial_path, read_object

logger = logging.getLogger("ctxlm_ds")

NAME = "output.log"
STATUS_NAME = "status.json"
HELD_LINES = 10_000
FILE_ONLY = {"file_only": True}
"""`extra` of a record for the file alone: a line that a live table shows on the terminal."""
_descriptor: int | None = None


class OutputLog:
    """Holds the logger's records from now on until the run directory is this process's, then appends them to the file.

    A start that ends before leaves no file.
    """

    def __init__(self) -> None:
        self._held = MemoryHandler(HELD_LINES, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
        logger.addHandler(self._held)

    def open(self, run_dir: Path) -> None:
        """Write to the file from now on; without one (OSError) the run continues with a warning."""
        global _descriptor
        logger.removeHandler(self._held)
        try:
            file = _LogFile(run_dir / NAME, encoding="utf-8")
            _descriptor = os.open(run_dir / NAME, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            logger.warning("%s cannot be written, the run continues: %s", run_dir / NAME, error.strerror)
            return
        file.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
        self._held.setTarget(file)
        self._held.flush()
        logger.addHandler(file)


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: a full disk costs lines, not the run."""


def say(text: str, begin: str = "") -> None:
    """Write text to standard error, after `begin`, and to the file if there is one, not through logging.

    In one write, or the ranks' blocks mix; and a signal may have interrupted the logger itself.
    """
    # The reader may have ended, the disk may be full.
    for descriptor, start in ((2, begin), (_descriptor, "")):
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.write(descriptor, f"{start}{text}\n".encode(errors="replace"))


def read_status(run_dir: Path) -> dict[str, Any]:
    """Read the values of RUN/status.json; empty if it is missing or damaged."""
    return read_object(run_dir / STATUS_NAME) or {}


def update_status(run_dir: Path, **changes: Any) -> None:
    """Change values of RUN/status.json; a full or missing disk keeps the old ones.

    The values are state (starting, running, queued, stopped, completed, failed), why, step, of, loss,
    tokens_per_second, left_s, skipped, rollbacks, starts, checkpoint, last_failure, job_id, attempt and log. The file
    is replaced atomically, but not flushed to the disk, because that would take its time at each report.
    """
    path = run_dir / STATUS_NAME
    partial = partial_path(path)
    values = {**read_status(run_dir), **changes, "time_unix_s": round(time.time(), 3)}
    try:
        partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
