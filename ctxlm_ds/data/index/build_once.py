"""Build a folder once for several processes, on one host or on many that share the disk, that need it at the same time.

One of them locks FINAL.building/ (process/run_lock.py) and fills a folder in it; the others wait until that has its
final name. If the builder dies, another process takes the lock over (on the same host immediately, from another host
once its heartbeat is a minute old) and removes what it left. The lock only saves work: a folder gets its name by one
rename, and only when it is complete.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ctxlm_ds.atomic import fsync_path, fsync_tree
from ctxlm_ds.data.index.storage import META_NAME
from ctxlm_ds.errors import DataError, RunLockedError
from ctxlm_ds.process.run_lock import LOCK_NAME, RunLock

logger = logging.getLogger("ctxlm_ds")

BUILDING_SUFFIX = ".building"
PARTIAL_PREFIX = "index-"
FIRST_POLL_S = 0.5
LONGEST_POLL_S = 5.0
POLL_GROWTH = 1.5
HANDOVER_S = 0.01


def build_once(final: Path, fill: Callable[[Path], None]) -> bool:
    """Make the complete folder `final` exist and return True if this process has filled it, not another.

    `fill` writes every file into the folder it is given; after an error of it nothing is left, and a waiting process
    tries next. Raises DataError if `final` exists without its meta.json, or the disk refuses.
    """
    workplace = final.with_name(f"{final.name}{BUILDING_SUFFIX}")
    lock = RunLock(workplace, remedy="set data.sample_index_dir to another folder")
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
        except RunLockedError as error:
            if not is_announced:
                logger.info("waiting for the sample index %s: %s", final, error)
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
