"""A file of lines on a disk that may be full or unavailable for a while: no line is torn or lost."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

logger = logging.getLogger("ctxlm_ds")


class LineFile:
    """Appends complete lines, immediately or as soon as the disk accepts them; the folder must exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[tuple[int, str]] = []

    def append(self, step: int, line: str) -> None:
        """Add a line (without its end) about a step."""
        was_well = not self._waiting
        self._waiting.append((step, line))
        error = self._flush()
        if error is not None and was_well:
            logger.warning(
                "%s cannot be written (%s); its lines are kept in memory until it can", self.path, error.strerror
            )
        if error is None and not was_well:
            logger.info("%s is written again", self.path)

    def forget_after(self, step: int) -> None:
        """Drop lines of later steps that are not in the file yet."""
        self._waiting = [(own, line) for own, line in self._waiting if own <= step]

    def close(self) -> None:
        """Write the lines that wait; warn of them if the disk still does not accept them."""
        if self._waiting and self._flush() is not None:
            logger.warning("%s lacks its last %d lines: it could not be written", self.path, len(self._waiting))

    def _flush(self) -> OSError | None:
        """Write the lines that wait, and return None, or why they cannot be written."""
        try:
            self._write("".join(f"{waiting}\n" for _, waiting in self._waiting).encode())
        except OSError as error:
            return error
        self._waiting.clear()
        return None

    def _write(self, data: bytes) -> None:
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            before_bytes = os.fstat(handle).st_size
            if os.write(handle, data) < len(data):
                # A disk that becomes full accepts a part.
                os.ftruncate(handle, before_bytes)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        finally:
            os.close(handle)
