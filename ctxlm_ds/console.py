"""Output for people: progress on a terminal, plain lines in a log file, errors without a traceback."""

from __future__ import annotations

import argparse
import io
import logging
import os
import resource
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

from ctxlm_ds.errors import CtxlmError

logger = logging.getLogger("ctxlm_ds")
PLAIN_INTERVAL_S = 10.0
LOG_PREFIX = len("12:34:56 ")
LONG_NAME = 24
OPEN_FILES = 256
"""Files that a command may have open; imports alone have some 40."""
LEAST_OPEN_FILES = 48
"""With fewer, libraries abort the process without an error."""


def setup_logging(rank: int = 0) -> None:
    """Log plain lines to stderr on rank 0; other ranks log only warnings, with their rank."""
    prefix = "" if rank == 0 else f"[rank {rank}] "
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False


def run_command(main: Callable[[], None]) -> None:
    """Run the main function of a tool; a user's mistake ends with one message and exit status 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    try:
        _allow_open_files()
        main()
    except MemoryError:
        print("error: there is not enough memory; see `ulimit -v`, the limit of the job, or use less", file=sys.stderr)
        sys.exit(2)
    except CtxlmError as error:
        print("error:", printable(str(error), kept="\n"), file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt as interrupt:
        print(f"interrupted; {str(interrupt) or 'nothing incomplete was kept'}", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"error: {error.strerror or error}{where}", file=sys.stderr)
        sys.exit(2)


def _allow_open_files() -> None:
    """Raise this process's limit on open files to OPEN_FILES if the system's own allows it.

    Raises CtxlmError if the system's own limit is below LEAST_OPEN_FILES.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < LEAST_OPEN_FILES:
        text = f"{hard} open files are allowed, and {LEAST_OPEN_FILES} to {OPEN_FILES} are needed"
        raise CtxlmError(f"{text}; raise the limit (ulimit -n)")
    if 0 <= soft < OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard) if hard >= 0 else OPEN_FILES, hard))


def printable(text: str, kept: str = "") -> str:
    """Return a text with a blank for each character that ends a line, moves a terminal's cursor, or is not Unicode."""
    return "".join(one if one.isprintable() or one in kept else " " for one in text)


def program(module: str) -> str:
    """Return how the running command was called, for usage lines: `ctxlm NAME`, or `python -m MODULE`."""
    return sys.argv[0] if sys.argv[0].startswith("ctxlm ") else f"python -m {module}"


def counted(count: int, noun: str) -> str:
    """Format a count: `1 document`, `1,234 documents`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_size(num_bytes: float) -> str:
    """Format a number of bytes with the largest unit that gives at least 1: `2.5 GB`, `31.0 MB`, `0.2 kB`."""
    size, unit = next((pair for pair in ((1e9, "GB"), (1e6, "MB")) if num_bytes >= pair[0]), (1e3, "kB"))
    return f"{num_bytes / size:,.1f} {unit}"


def at_least(lowest: int) -> Callable[[str], int]:
    """Return an argparse type: a whole number of at least `lowest`."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{value} is too small; give {lowest} or more")
        return value

    return number


def aligned(table: Sequence[Sequence[str]], left: Container[int] = (0,), indent: str = "  ") -> list[str]:
    """Pad the columns of a table; those in `left` are left-aligned, the others right-aligned.

    On a narrower terminal (in a log, the time comes first) cells continue on the next line: figures are never cut, long
    names of a table of more than two columns may be.
    """
    columns = list(zip(*table, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if sys.stdout.isatty():
        longest = [max(len(word) for cell in column for word in ("", *cell.split())) for column in columns]
        names = LONG_NAME if len(widths) > 2 else max(widths)
        spare = [width - min(longest[i], names if i in left else width) for i, width in enumerate(widths)]
        room = shutil.get_terminal_size().columns - len(indent) - 2 * (len(widths) - 1) - LOG_PREFIX
        while sum(widths) > room and any(spare):
            widest = spare.index(max(spare))
            widths[widest], spare[widest] = widths[widest] - 1, spare[widest] - 1
    lines = []
    for row in table:
        parts = [textwrap.wrap(cell, max(1, widths[i]), break_on_hyphens=False) for i, cell in enumerate(row)]
        for cells in zip_longest(*parts, fillvalue="") if any(parts) else [row]:
            padded = [cell.ljust(widths[i]) if i in left else cell.rjust(widths[i]) for i, cell in enumerate(cells)]
            lines.append(indent + "  ".join(padded).rstrip())
    return lines


def format_duration(seconds: float) -> str:
    """Format seconds: 75 as `1:15`, 3700 as `1:01:40`."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


class ByteProgress:
    """Speed and time left of a job that reads `total_bytes` (0 if unknown), as plain lines."""

    def __init__(self, title: str, total_bytes: int) -> None:
        self._title = title
        self._total_bytes = total_bytes
        self._start_s = self._last_line_s = time.monotonic()

    def update(self, done_bytes: int, note: str = "") -> None:
        """Show the bytes read so far and a short note such as the number of documents."""
        now_s = time.monotonic()
        if now_s - self._last_line_s < PLAIN_INTERVAL_S:
            return
        self._last_line_s = now_s
        if not self._total_bytes:
            logger.info("%s: %s", self._title, note)
            return
        if done_bytes <= 0:  # the first block of a compressed file is still being read
            logger.info("%s: started %s", self._title, note)
            return
        speed = done_bytes / max(1e-9, now_s - self._start_s)
        left = format_duration((self._total_bytes - done_bytes) / max(1.0, speed))
        percent = 100 * done_bytes / self._total_bytes
        logger.info("%s: %.0f%% %.2f MB/s, %s left %s", self._title, percent, speed / 1e6, left, note)


class _ProgressBar(ByteProgress):
    """The same on a terminal."""

    def __init__(self, title: str, total_bytes: int) -> None:
        from rich import progress
        from rich.console import Console

        columns = (progress.DownloadColumn(), progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
        note = "{task.fields[note]}"
        self.bar = progress.Progress(
            "{task.description}", progress.BarColumn(), *columns, note, console=Console(stderr=True)
        )
        self._task = self.bar.add_task(title, total=total_bytes or None, note="")

    def update(self, done_bytes: int, note: str = "") -> None:
        self.bar.update(self._task, completed=done_bytes, note=note)


@contextmanager
def byte_progress(title: str, total_bytes: int) -> Iterator[ByteProgress]:
    """Yield the progress of a job: a bar on a terminal, plain lines in a log file."""
    if not sys.stderr.isatty():
        yield ByteProgress(title, total_bytes)
        return
    progress = _ProgressBar(title, total_bytes)
    with progress.bar:
        yield progress
