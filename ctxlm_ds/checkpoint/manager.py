"""Checkpoints that are complete or do not exist: written aside by all ranks, listed, renamed; `latest` moves last.

In: what to write, as functions. Out: RUN/checkpoints/step-XXXXXXXX with a manifest, rotated, and the newest intact one
at a resume. Not here: what a checkpoint holds (training.py, layout_free.py).
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import fsync_path, fsync_tree, write_text
from ctxlm_ds.checkpoint.folders import (
    CHECKPOINTS_DIR,
    LATEST_NAME,
    PARTIAL_SUFFIX,
    find_newest_intact,
    list_checkpoints,
    remove_folder,
    remove_leftovers,
    step_name,
    to_rotate,
)
from ctxlm_ds.checkpoint.manifest import FileEntry, hash_files, list_files, read_manifest, verify, write_manifest
from ctxlm_ds.config.schema import CheckpointConfig
from ctxlm_ds.errors import CheckpointError, CtxlmError, RunLockedError
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.run_lock import RunLock

logger = logging.getLogger("ctxlm_ds")

SHARED_FOLDER_WAIT_S = 10.0
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class _Written:
    """What one rank did: its files, what its `write` returned, or why it failed."""

    rank: int
    files: dict[str, FileEntry]
    value: Any = None
    error: str | None = None


class CheckpointManager:
    """The checkpoints of one run directory. Every rank makes one and calls its methods together.

    Args:
        run_dir: the run directory, on storage that every rank sees.
        config: rotation.
        topology: of all ranks.
        lock: rank 0's lock of the run directory; it is confirmed before anything is written or removed.
    """

    def __init__(
        self, run_dir: str | Path, config: CheckpointConfig, topology: Topology, lock: RunLock | None = None
    ) -> None:
        self.directory = Path(run_dir) / CHECKPOINTS_DIR
        self._config = config
        self._topology = topology
        self._lock = lock
        self._damaged: set[int] = set()

    def clean_leftovers(self) -> None:
        """Remove half-written and half-removed checkpoints of a killed process.

        Raises:
            RunLockedError: this run's lock is not held (they may be a live process's).
        """

        def clean() -> None:
            if self._lock is None:
                raise CheckpointError(f"{self.directory}: leftovers are only removed under the run directory's lock")
            self._lock.check()
            for name in remove_leftovers(self.directory):
                logger.info("removed the unfinished %s", self.directory / name)

        self._topology.run_on_rank_0(clean)

    def find_resumable(self) -> Path | None:
        """The newest checkpoint that verifies, on every rank; None where the run has none yet.

        Rank 0 reads every byte and warns about each damaged one, naming the file and what differs.

        Raises:
            CheckpointError: there are checkpoints and all are damaged.
        """
        search = self._topology.compute_on_rank_0(lambda: find_newest_intact(self.directory))
        self._damaged = {step for step, path in list_checkpoints(self.directory).items() if path in search.damaged}
        return search.newest

    def save(
        self,
        step: int,
        write: Callable[[Path], object],
        finish: Callable[[Path, list[Any]], None],
        estimated_bytes: int = 0,
    ) -> Path:
        """Write the checkpoint of a step; nothing to do where it exists and verifies.

        Args:
            step: optimizer step.
            write: called on every rank with the folder to fill. It must hold no collective, or a rank that fails
                would leave the others waiting; what it returns (picklable) travels to rank 0. A rank's own files end
                in -RRRRR before the extension, so that it flushes and hashes them itself.
            finish: called on rank 0 with the folder and what every rank's `write` returned, by rank.
            estimated_bytes: expected size of the whole checkpoint; 0 takes that of the newest one.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: the same on every rank, whichever failed; the partial folder is gone and the older
                checkpoints are untouched.
        """
        final = self.directory / step_name(step)
        partial = final.with_name(final.name + PARTIAL_SUFFIX)
        if not self._together(step, lambda: self._prepare(final, partial, estimated_bytes)):
            return final
        started_s = time.monotonic()
        gathered = self._topology.gather_object(self._write_own(partial, write))
        self._together(step, lambda: self._complete(step, partial, final, gathered or [], finish))
        if self._topology.is_main:
            logger.info("saved %s in %.1f s", final, time.monotonic() - started_s)
            self._rotate(step)
        return final

    def _together(self, step: int, action: Callable[[], Any]) -> Any:
        """Run a part of a save on rank 0; a failure is the same CheckpointError on every rank."""

        def attempt() -> Any:
            try:
                return action()
            except CtxlmError:
                raise
            except OSError as error:
                raise CheckpointError(_failure(step, self._topology.rank, _explain(error))) from error

        return self._topology.compute_on_rank_0(attempt)

    # Rank 0, before: room and an empty folder

    def _prepare(self, final: Path, partial: Path, estimated_bytes: int) -> bool:
        if self._lock is not None:
            self._lock.check()
        if final.exists():
            try:
                verify(final)
                return False
            except CheckpointError as error:
                logger.warning("%s; it is written again", error)
        self.directory.mkdir(parents=True, exist_ok=True)
        if partial.exists():
            remove_folder(partial)
        self._check_space(final, estimated_bytes or self._newest_bytes())
        partial.mkdir()
        return True

    def _check_space(self, final: Path, needed_bytes: int) -> None:
        free_bytes = shutil.disk_usage(self.directory).free
        if needed_bytes > free_bytes:
            raise CheckpointError(
                f"{final}: a checkpoint needs {needed_bytes / 1e9:.3f} GB and {free_bytes / 1e9:.3f} GB are free in "
                f"{self.directory}: {(needed_bytes - free_bytes) / 1e9:.3f} GB are missing. Free space there, or lower "
                f"checkpoint.keep_last (now {self._config.keep_last})"
            )

    def _newest_bytes(self) -> int:
        for folder in reversed(list_checkpoints(self.directory).values()):
            try:
                return read_manifest(folder).total_bytes
            except CheckpointError:
                continue
        return 0

    # Every rank: its own files

    def _write_own(self, partial: Path, write: Callable[[Path], object]) -> _Written:
        rank = self._topology.rank
        try:
            _wait_for_folder(partial)
            value = write(partial)
            own = [name for name in list_files(partial) if Path(name).stem.endswith(f"-{rank:05d}")]
            for name in own:
                fsync_path(partial / name)
            return _Written(rank, hash_files(partial, own), value)
        except (OSError, CtxlmError) as error:
            return _Written(rank, {}, error=_explain(error))
        except Exception as error:
            logger.exception("writing %s failed on rank %d", partial, rank)
            return _Written(rank, {}, error=f"{type(error).__name__}: {error}")

    # Rank 0, after: the rest, the manifest, the names

    def _complete(
        self,
        step: int,
        partial: Path,
        final: Path,
        gathered: list[_Written],
        finish: Callable[[Path, list[Any]], None],
    ) -> None:
        try:
            failed = [written for written in gathered if written.error is not None]
            if failed:
                raise CheckpointError(_failure(step, failed[0].rank, str(failed[0].error)))
            finish(partial, [written.value for written in gathered])
            files = {name: entry for written in gathered for name, entry in written.files.items()}
            fsync_tree(partial)
            files.update(hash_files(partial, [name for name in list_files(partial) if name not in files]))
            write_manifest(partial, step, files)
            if self._lock is not None:
                self._lock.check()
            if final.exists():
                remove_folder(final)
            os.rename(partial, final)
            fsync_path(self.directory)
        except RunLockedError:
            # The folder of that name is another job's by now.
            raise
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._damaged.discard(step)
        self._move_latest(final)

    def _move_latest(self, final: Path) -> None:
        try:
            write_text(self.directory / LATEST_NAME, final.name + "\n")
        except OSError as error:
            logger.warning("%s is complete, but %s could not be moved: %s", final, LATEST_NAME, _explain(error))

    def _rotate(self, newest: int) -> None:
        folders = list_checkpoints(self.directory)
        every = self._config.keep_every_steps
        for step in to_rotate(list(folders), newest, self._config.keep_last, every, self._damaged):
            try:
                remove_folder(folders[step])
            except OSError as error:
                logger.warning("could not remove the old checkpoint %s: %s", folders[step], _explain(error))


def _wait_for_folder(partial: Path) -> None:
    """A network file system may show another host's new folder a moment late."""
    deadline_s = time.monotonic() + SHARED_FOLDER_WAIT_S
    while not partial.is_dir():
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                f"{partial} was made by rank 0 and is not to be seen on {socket.gethostname()}: the run directory must "
                "lie on storage that all nodes share"
            )
        time.sleep(0.1)


def _failure(step: int, rank: int, reason: str) -> str:
    return f"the checkpoint of step {step} could not be written (rank {rank}): {reason}. Older checkpoints are intact"


def _explain(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    where = f" ({error.filename})" if error.filename else ""
    text = f"{error.strerror or error}{where} on {socket.gethostname()}"
    return text + "; free space there or raise the quota" if error.errno in FULL_DISK_ERRORS else text
