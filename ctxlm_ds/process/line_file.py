"""RUN/metrics.jsonl, one JSON object with a step per line: the writer and the one reader.

The writer loses and tears no line on a disk that is full or unavailable for a while. Needs no torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ctxlm_ds.untrusted_json import open_regular

logger = logging.getLogger("ctxlm_ds")

METRICS_NAME = "metrics.jsonl"
HELD_OUT = "eval/"
"""The names of held-out figures begin so: eval/SOURCE/FIGURE."""
TEXTS = "texts"
"""Figure of the lines with continued texts: pairs of what was given and what the model wrote."""
MAX_LINE_BYTES = 1 << 20


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line, None if it is torn or has no step."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        if line.endswith(b"\n") and isinstance(record, dict) and type(record.get("step")) is int:
            return record
    return None


def read_lines(path: Path, most: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the objects of a metrics.jsonl; damaged lines are left out, a file that cannot be read has none.

    Args:
        path: the file.
        most: about how many lines to parse, evenly spread (None: all), and all with held-out figures or texts.
    """
    with contextlib.suppress(OSError), open_regular(path) as file:
        size, length = os.fstat(file.fileno()).st_size, max(1, len(file.readline(MAX_LINE_BYTES)))
        every = 1 if most is None else size + 1 if most == 0 else max(1, size // (length * most))
        file.seek(0)
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), 1):
            rare = f'"{HELD_OUT}'.encode() in line or f'"{TEXTS}"'.encode() in line
            if (rare or number % every == 0) and (record := parse_line(line)) is not None:
                yield record


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
