"""Files of a sample index: .npy arrays written in pieces and memory-mapped for reading, and meta.json.

verified.json is no part of an index: it only says which files the start of a job need not read again to verify them.

Several processes, on one host or on many that share the disk, may need an index at the same time. One of them locks
FINAL.building/ (process/run_lock.py) and fills a folder in it; the others wait until that has its final name. If the
builder dies, another process takes the lock over (on the same host immediately, from another host once its heartbeat is
a minute old) and removes what it left. The lock only saves work: a folder gets its name by one rename, and only when it
is complete.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ctxlm_ds.atomic import fsync_path, fsync_tree, read_object, write_text
from ctxlm_ds.console import logger
from ctxlm_ds.data.dataset.metadata import check_digest, file_digest
from ctxlm_ds.errors import DataError, RunLockedError
from ctxlm_ds.process.run_lock import LOCK_NAME, RunLock
from ctxlm_ds.untrusted_json import read_json_object

META_NAME = "meta.json"
VERIFIED_NAME = "verified.json"
SETTLED_NS = 2_000_000_000
HASHING_THREADS = 8
NPY_HEADER_BYTES = 128
LOGGED_BYTES = 1 << 30
BUILDING_SUFFIX = ".building"
PARTIAL_PREFIX = "index-"
FIRST_POLL_S = 0.5
LONGEST_POLL_S = 5.0
POLL_GROWTH = 1.5
HANDOVER_S = 0.01
REMEDY = "delete the folder and build the samples again (ctxlm samples)"


class NpyAppender:
    """A one-dimensional .npy file that grows; its header has room for any length and is corrected at the end."""

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self.count = 0
        self._handle = open(path, "wb")  # noqa: SIM115 - open for as long as the object
        self._write_header()

    def append(self, values: NDArray[Any]) -> None:
        self._handle.write(np.ascontiguousarray(values, dtype=self.dtype).tobytes())
        self.count += len(values)

    def _write_header(self) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._handle, header)

    def __enter__(self) -> NpyAppender:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.seek(0)
        self._write_header()
        self._handle.close()


def open_array(directory: Path, name: str) -> NDArray[Any]:
    """Map an array into memory, as a plain ndarray: slicing a memmap object costs several times more."""
    path = directory / f"{name}.npy"
    try:
        # An array without elements cannot be mapped.
        is_empty = path.stat().st_size <= NPY_HEADER_BYTES
        return np.asarray(np.load(path, mmap_mode=None if is_empty else "r"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not readable ({error}); {REMEDY}") from error


def write_meta(directory: Path, meta: dict[str, Any]) -> None:
    """Write meta.json with the size and the sha256 of every other file of the folder."""
    paths = sorted(directory.iterdir())
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, _digests(paths), strict=True)
    }
    (directory / META_NAME).write_text(json.dumps(meta | {"files": files}, indent=1) + "\n", encoding="utf-8")


def read_meta(directory: Path, key: str) -> dict[str, Any]:
    """Read meta.json. Raises DataError if the index has another key, or a file is missing or has another size."""
    path = directory / META_NAME
    try:
        meta = read_json_object(path)
        found, files = meta["key"], {name: int(entry["bytes"]) for name, entry in meta["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(f"{path}: not the description of a sample index ({error!r}); {REMEDY}") from error
    if found != key:
        raise DataError(
            f"{path}: this is the index with the key {str(found)[:12]}, not {key[:12]}: the folder was renamed; "
            "restore its name, or delete it"
        )
    for name, expected in files.items():
        size = (directory / name).stat().st_size if (directory / name).exists() else None
        if size != expected:
            fault = "is missing" if size is None else f"has {size} bytes instead of {expected}"
            raise DataError(f"{directory / name}: {fault}; {REMEDY}")
    return meta


def verify_files(directory: Path, meta: dict[str, Any], trust: bool = False) -> None:
    """Compare the sha256 of the files of an index with meta.json's. Raises DataError if one differs.

    With `trust` a file is not read if it is as verified.json says that it was when it was last compared: same size,
    inode, and times of the last change of its contents and of these facts.
    """
    recorded = read_object(directory / VERIFIED_NAME) or {}
    known = recorded if trust else {}
    states = {name: _file_state(directory / name) for name in meta["files"]}
    unread = [name for name, state in states.items() if known.get(name) != [meta["files"][name]["sha256"], *state]]
    total_bytes = sum(meta["files"][name]["bytes"] for name in unread)
    if total_bytes >= LOGGED_BYTES:
        logger.info("verifying the sample index %s (%.1f GB)", directory, total_bytes / 1e9)
    paths = [directory / name for name in unread]
    for path, digest in zip(paths, _digests(paths), strict=True):
        check_digest(path, digest, meta["files"][path.name]["sha256"], META_NAME, REMEDY)
    # A file that is as young as the clock is coarse may change again without a trace.
    old_ns = time.time_ns() - SETTLED_NS
    settled = {name: [meta["files"][name]["sha256"], *s] for name, s in states.items() if max(s[1:3]) < old_ns}
    if settled and settled != recorded:
        with suppress(OSError):  # the folder may be read-only
            write_text(directory / VERIFIED_NAME, json.dumps(settled) + "\n")


def _file_state(path: Path) -> tuple[int, int, int, int]:
    state = path.stat()
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino


def _digests(paths: Iterable[Path]) -> list[str]:
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        return list(threads.map(file_digest, paths))


def build_once(final: Path, fill: Callable[[Path], None]) -> bool:
    """Make the complete folder `final` exist and return True if this process has filled it, not another.

    `fill` writes every file into the folder it is given; after an error of it nothing is left, and a waiting process
    tries next. Raises DataError if `final` exists without its meta.json, or the disk refuses.
    """
    workplace = final.with_name(f"{final.name}{BUILDING_SUFFIX}")
    lock = RunLock(workplace)
    try:
        return _build_or_wait(final, fill, lock)
    except OSError as error:
        with suppress(OSError):  # not even the lock could be written
            workplace.rmdir()
        where = f" ({error.filename})" if error.filename else ""
        raise DataError(
            f"{final.parent}: the sample index {final.name} cannot be built there: {error.strerror or error}{where}; "
            "free space, or set data.sample_index_dir to a folder that can be written to and has room"
        ) from error


def _build_or_wait(final: Path, fill: Callable[[Path], None], lock: RunLock) -> bool:
    is_announced, poll_s = False, FIRST_POLL_S
    if (final / META_NAME).exists() and lock.run_dir.exists():
        # Its builder died, or is about to leave.
        with suppress(RunLockedError, OSError):
            lock.acquire()
            _leave(lock)
    while not (final / META_NAME).exists():
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except RunLockedError:
            if not is_announced:
                logger.info("waiting for the sample index %s, which %s builds", final, lock.describe_holder())
            is_announced = True
            # Nodes that started together must not look at one file server at the same moments.
            time.sleep(poll_s * random.uniform(0.5, 1.0))
            poll_s = min(LONGEST_POLL_S, poll_s * POLL_GROWTH)
        except FileNotFoundError:  # its last user has just removed the workplace
            time.sleep(HANDOVER_S)
        else:
            if _build_locked(final, fill, lock):
                return True
    return False


def _build_locked(final: Path, fill: Callable[[Path], None], lock: RunLock) -> bool:
    """Fill a temporary folder and rename it; return False if it exists already or the lock was lost meanwhile."""
    try:
        if (final / META_NAME).exists():
            return False
        if final.exists():
            raise DataError(f"{final}: has no {META_NAME}; it is damaged, delete the folder")
        for left in lock.run_dir.glob(f"{PARTIAL_PREFIX}*"):
            shutil.rmtree(left)
        # A unique name: a suspended process that wakes up after a takeover must not write into its successor's folder.
        partial = lock.run_dir / f"{PARTIAL_PREFIX}{uuid.uuid4().hex}"
        partial.mkdir()
        logger.info("building the sample index %s", final)
        fill(partial)
        fsync_tree(partial)
        lock.check()
        os.rename(partial, final)
        fsync_path(final.parent)
        return True
    except (OSError, RunLockedError):
        try:
            lock.check()
        except RunLockedError:
            logger.warning("the sample index %s is being built by another process now", final)
            return False
        raise
    finally:
        _leave(lock)


def _leave(lock: RunLock) -> None:
    """Release the lock, and remove its folder unless another process has locked it already."""
    with suppress(RunLockedError):
        lock.check()
        # Includes the files of processes that were killed while they took the lock; a living one tries again.
        for left in lock.run_dir.iterdir():
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            elif left.name != LOCK_NAME:
                left.unlink(missing_ok=True)
    lock.release()
    with suppress(OSError):
        lock.run_dir.rmdir()
