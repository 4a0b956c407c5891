"""Files of a run directory on a disk that may be full or unavailable for a while, which costs lines, not the run.

RUN/output.log has what rank 0 says, with dates, over all starts; RUN/status.json the run's present state;
RUN/metrics.jsonl a line of figures for each reported step.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from functools import partial
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, TypeVar

from ctxlm_ds.atomic import partial_path, read_object
from ctxlm_ds.console import logger, printable
from ctxlm_ds.untrusted_json import open_regular, parse_json

Kind = TypeVar("Kind", int, float, str)

METRICS_NAME = "metrics.jsonl"
FORK_RECORD = "forked_from.json"
"""Says which checkpoint of which run a branch began with."""
HELD_OUT = "eval/"
"""The names of held-out figures begin so: eval/SOURCE/FIGURE."""
TEXTS = "texts"
"""Figure of the lines with continued texts: pairs of what was given and what the model wrote."""
MAX_LINE_BYTES = MAX_STATUS_BYTES = 1 << 20
LARGEST = 1e15
"""Largest number of a file that another program may have written; of whole numbers, a float holds each up to it."""

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
    return read_object(run_dir / STATUS_NAME, MAX_STATUS_BYTES) or {}


def read_verdict(values: Mapping[str, Any]) -> list[str]:
    """Return the lines of the verdict in the values of a status.json; none before the run has ended."""
    lines = values.get("verdict")
    return [printable(line) for line in lines if isinstance(line, str)] if isinstance(lines, list) else []


def update_status(run_dir: Path, **changes: Any) -> None:
    """Change values of RUN/status.json; a full or missing disk keeps the old ones.

    The values are state (starting, running, queued, stopped, completed, failed), why, step, of, loss,
    tokens_per_second, left_s, skipped, rollbacks, starts, checkpoint, last_failure, job_id, attempt, log and verdict.
    The file is replaced atomically, but not flushed to the disk, because that would take its time at each report.
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


def parse_line(line: bytes, name: str = "step", kind: type = int) -> dict[str, Any] | None:
    """Return the object of a line, None if it is torn or has no value of a kind under a name."""
    with contextlib.suppress(ValueError):
        record = parse_json(line)
        is_object = line.endswith(b"\n") and isinstance(record, dict)
        if is_object and type(record.get(name)) is kind and (kind is not int or abs(record[name]) < LARGEST):
            return record
    return None


def read_value(values: Mapping[str, Any], name: str, kind: type[Kind], largest: float = LARGEST) -> Kind | None:
    """Return a text without control characters, or a number up to `largest`; None for anything else in a file."""
    value: Any = values.get(name)
    if kind is str:
        text = printable(value, kept="\n") if isinstance(value, str) else ""
        return text or None  # type: ignore[return-value]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < largest
    return kind(value) if is_number else None


def read_lines(path: Path, most: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the objects of a metrics.jsonl; damaged lines are left out, a file that cannot be read has none.

    About `most` lines are parsed, evenly spread (None: all), the last line, and all with held-out figures or texts.
    """
    with contextlib.suppress(OSError), open_regular(path) as file:
        size, length = os.fstat(file.fileno()).st_size, max(1, len(file.readline(MAX_LINE_BYTES)))
        every = 1 if most is None else size + 1 if most == 0 else max(1, size // (length * most))
        file.seek(0)
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), 1):
            rare = f'"{HELD_OUT}'.encode() in line or f'"{TEXTS}"'.encode() in line
            wanted = rare or number % every == 0 or (most and file.tell() == size)
            if wanted and (record := parse_line(line)) is not None:
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
