"""Atomic files and folders, which are complete or missing: written under a temporary name, flushed, then renamed.

An output records its inputs and settings, so that the same command recognizes it and another one is refused.
"""

from __future__ import annotations

import errno
import glob
import json
import logging
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ctxlm_ds.untrusted_json import MAX_BYTES, read_json_object

logger = logging.getLogger("ctxlm_ds")

PARTIAL_MARK = ".partial-"
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAX_HOST_CHARACTERS = 32


def partial_path(path: Path) -> Path:
    """Return a unique name in the folder of `path`, under which it is written until it is complete."""
    return path.with_name(f"{path.name}{PARTIAL_MARK}{_own_mark()}")


def _own_mark() -> str:
    # Containers may share process ids and host names. Host and process help a person who finds a leftover.
    return f"{os.uname().nodename[:_MAX_HOST_CHARACTERS]}-{os.getpid()}-{secrets.token_hex(4)}"


def is_full_disk(error: BaseException) -> bool:
    """Return whether an error means a full disk, an exceeded quota, or a file larger than allowed."""
    return isinstance(error, OSError) and error.errno in FULL_DISK_ERRORS


def fsync_path(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(directory: Path) -> None:
    """Flush every file below `directory` and the folders themselves."""
    for root, _, files in os.walk(directory):
        for name in files:
            fsync_path(Path(root) / name)
        fsync_path(Path(root))


def publish(partial: Path, final: Path) -> None:
    """Rename a finished file to its final name and flush the folder that holds it."""
    os.replace(partial, final)
    fsync_path(final.parent)


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically; what is not UTF-8 (in the name of a file) is written as its escape."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    try:
        with open(partial, "wb") as handle:
            handle.write(text.encode(errors="backslashreplace"))
            handle.flush()
            os.fsync(handle.fileno())
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def output_folder(path: Path, replace: bool = True) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` on success and is removed on failure.

    An existing folder is replaced. With `replace` false it stays, and FileExistsError is raised: of several processes
    that write one path, the first to finish wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Their writers may have been killed, or run on another host.
    for left in sorted(path.parent.glob(f"{glob.escape(path.name)}{PARTIAL_MARK}*")):
        logger.warning("%s is left from an interrupted run; remove it if none is running", left)
    partial = partial_path(path)
    with stop_signals_interrupt():
        partial.mkdir()
        try:
            yield partial
            fsync_tree(partial)
            _put_in_place(partial, path, replace)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: Path, path: Path, replace: bool) -> None:
    replaced = path.with_name(f"{path.name}.replaced-{_own_mark()}")
    if path.exists() and replace:
        os.rename(path, replaced)
    try:
        os.rename(partial, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise FileExistsError(errno.EEXIST, "exists already", str(path)) from error
    fsync_path(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """Make SIGTERM end the block like Ctrl-C, so that unfinished files are removed.

    Without effect where SIGTERM is handled or ignored already, and outside of the main thread.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    own_pid = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        if os.getpid() == own_pid:
            raise KeyboardInterrupt
        os._exit(128 + number)  # a forked worker

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def read_object(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if it is missing, unreadable or something else."""
    try:
        return read_json_object(path, max_bytes=max_bytes)
    except ValueError:
        return None


def is_same(output: object, recorded: Mapping[str, Any] | None, wanted: Mapping[str, Any], remedy: str,
            error: type[Exception]) -> bool:  # fmt: skip
    """Return True if an existing output, by its record, was made from the wanted inputs and settings.

    Raises `error`, which ends with the remedy, if the record differs or is missing.
    """
    if recorded is None:
        raise error(f"{output} already exists without a record of how it was made; {remedy}")
    now = json.loads(json.dumps(wanted))
    names = [name for name in dict.fromkeys((*now, *recorded)) if now.get(name) != recorded.get(name)]
    if not names:
        return True
    changes = ", ".join(f"{name} {_shown(recorded.get(name))} -> {_shown(now.get(name))}" for name in names)
    raise error(f"{output} already exists and was made differently: {changes}; {remedy}")


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:12]}..."
