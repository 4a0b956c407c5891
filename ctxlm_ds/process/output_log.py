"""RUN/output.log: what rank 0 says, as plain lines with their dates, over all starts of a run."""

from __future__ import annotations

import contextlib
import logging
import os
from logging.handlers import MemoryHandler
from pathlib import Path

logger = logging.getLogger("ctxlm_ds")

NAME = "output.log"
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
