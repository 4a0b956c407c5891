"""The checkpoints of one run directory, each of which is complete or does not exist.

All ranks write into a partial folder, rank 0 adds the manifest and renames it, and `latest` moves last. The stages may
run in background threads. What needs all ranks (gathering what each wrote, reporting how it ended) is done by
`PendingSave.advance`, which the ranks call together, so that no thread holds a collective.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ctxlm_ds.atomic import fsync_path, is_full_disk, write_text
from ctxlm_ds.checkpoint import folders
from ctxlm_ds.checkpoint.chunk_index import WrittenFiles
from ctxlm_ds.checkpoint.ledger import LEDGER_NAME
from ctxlm_ds.checkpoint.manifest import Manifest, find_changed, refuse_damage, seal, share_of, verify
from ctxlm_ds.checkpoint.saved_state import reached_words
from ctxlm_ds.console import logger
from ctxlm_ds.errors import CheckpointError, CtxlmError, RunLockedError
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.process.run_lock import LOCK_NAME, RunLock
from ctxlm_ds.recipe.schema import CheckpointConfig
from ctxlm_ds.training.loop.saves import PendingSave

T = TypeVar("T")
Write = Callable[[Path], WrittenFiles]
Finish = Callable[[Path, list[Any]], None]


@dataclass(frozen=True)
class RankResult:
    """What one rank wrote, or why it failed."""

    written: WrittenFiles = field(default_factory=lambda: WrittenFiles(None, {}))
    error: str | None = None
    disk_full: bool = False
    """True if the error is a lack of space."""


def run_action(action: Callable[[], T], name: str, background: bool) -> Future[T]:
    """Run a function that holds no collective, in a thread with this name or before this returns.

    The thread does not keep the process alive: a disk that hangs must not delay the end of a run.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    if background:
        threading.Thread(target=run, name=name, daemon=True).start()
    else:
        run()
    return future


class CheckpointManager:
    """The checkpoints of one run directory; every rank makes a manager and calls its methods together.

    `lock` is rank 0's lock of the run directory, confirmed before anything is written or removed.
    """

    def __init__(
        self, run_dir: str | Path, config: CheckpointConfig, topology: Topology, lock: RunLock | None = None
    ) -> None:
        self.directory = Path(run_dir) / folders.CHECKPOINTS_DIR
        self._config = config
        self._topology = topology
        self._lock = lock
        self._damaged: set[int] = set()
        self._good: set[int] = set()
        """Steps of checkpoints that this process completed or verified."""
        self._was_full = False

    def clean_leftovers(self) -> None:
        """Remove half-written and half-removed checkpoints of a killed process. Raises RunLockedError without lock."""

        def clean() -> None:
            if self._lock is None:
                raise CheckpointError(f"{self.directory}: leftovers are only removed under the run directory's lock")
            self._check_lock()
            folders.remove_leftovers(self.directory)

        self._topology.run_on_rank_0(clean)

    def check_shared(self) -> None:
        """Raise CheckpointError if a node does not see rank 0's lock: the run directory is not on shared storage."""
        path = self.directory.parent / LOCK_NAME
        token = self._topology.compute_on_rank_0(lambda: self._lock.token if self._lock is not None else None)

        def check() -> None:
            if token is not None and self._topology.local_rank == 0:
                folders.wait_until(lambda: folders.holds(path, token), path, "is rank 0's lock")

        self._topology.run_together(check)

    def find_resumable(self) -> Path | None:
        """Return the newest checkpoint that verifies, on every rank; None if the run has none yet.

        The ranks share the files among them, and each reads every byte of its files. Rank 0 logs a warning for each
        damaged checkpoint. Raises CheckpointError if all are.
        """
        topology = self._topology
        present = topology.compute_on_rank_0(lambda: folders.list_checkpoints(self.directory))
        newest, damaged = folders.find_newest_intact(self.directory, self._verify_together, present, topology.is_main)
        self._damaged = {folders.step_of(folder) for folder in damaged}
        if newest is not None:
            self._good.add(folders.step_of(newest))
        return newest

    def _verify_together(self, folder: Path) -> Manifest:
        """Verify one checkpoint. Raises CheckpointError with what any rank found, on every rank."""
        topology = self._topology
        manifest = topology.compute_on_rank_0(lambda: verify(folder, quick=True))
        own = share_of(manifest.files, topology.rank, topology.world_size)
        found = topology.gather_some(find_changed(folder, manifest, own) or None)
        refuse_damage(folder, [problem for problems in found.values() for problem in problems])
        return manifest

    def last_good(self) -> Path | None:
        """Return the newest checkpoint that this process completed or verified."""
        return self.directory / folders.step_name(max(self._good)) if self._good else None

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps after a rollback, so that no restart resumes from them."""

        def remove() -> None:
            self._check_lock()
            for later, folder in sorted(folders.list_checkpoints(self.directory).items(), reverse=True):
                if later > step:
                    folders.remove_folder(folder)
                    logger.info("removed %s: the run went back to step %d", folder, step)
            if (self.directory / folders.step_name(step)).is_dir():
                self._move_latest(self.directory / folders.step_name(step))

        self._together(step, remove)
        self._good = {kept for kept in self._good if kept <= step}
        self._damaged = {kept for kept in self._damaged if kept <= step}

    def begin(
        self, step: int, take: Callable[[], Write], finish: Finish, needed_bytes: int, background: bool
    ) -> PendingSave | None:
        """Begin the checkpoint of a step: check for space, take what is to be written, start to write it.

        `take` is called on every rank once there is space; it returns the function that fills the folder it is given.
        Neither may hold a collective, or a rank that fails would leave the others waiting. `finish` is called on rank 0
        with the folder and the `value` of every rank's WrittenFiles, by rank. Without `background` all is written
        before this returns. Return the save, to be advanced to its end; None if the checkpoint exists and verifies.
        Raises CheckpointError without space, the same on every rank.
        """
        if not self._together(step, lambda: self._prepare(step, needed_bytes)):
            self._good.add(step)
            return None
        # The other ranks wait for this rank's part, which reports a failure.
        taken = run_action(take, f"take-step-{step}", background=False)
        return PendingSave(self._stages(step, taken, finish, background))

    def _stages(self, step: int, taken: Future[Write], finish: Finish, background: bool) -> Iterator[Future[Any]]:
        """Yield this rank's work of each stage of a save; the collective parts are between the stages."""
        started_s = time.monotonic()
        writing = run_action(lambda: self._write_own(step, taken), f"write-step-{step}", background)
        yield writing
        gathered = self._topology.gather_object(writing.result())

        def complete() -> None:
            if gathered is not None:
                self._complete(step, gathered, finish, started_s)

        completing = run_action(complete, f"complete-step-{step}", background and gathered is not None)
        yield completing
        self._together(step, completing.result)
        self._good.add(step)

    def _folders(self, step: int) -> tuple[Path, Path]:
        """Return the checkpoint's folder, and the one in which it is written."""
        final = self.directory / folders.step_name(step)
        return final, final.with_name(final.name + folders.PARTIAL_SUFFIX)

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def _together(self, step: int, action: Callable[[], Any]) -> Any:
        """Run a part of a save on rank 0 and raise its failure as the same CheckpointError on every rank."""

        def attempt() -> Any:
            try:
                return action()
            except OSError as error:
                raise CheckpointError(_failure(step, self._topology.rank, folders.explain(error))) from error

        return self._topology.compute_on_rank_0(attempt)

    def _prepare(self, step: int, needed_bytes: int) -> bool:
        """Make space and an empty folder, on rank 0; return False if the checkpoint exists and verifies."""
        final, partial = self._folders(step)
        self._check_lock()
        if final.exists() and step not in self._damaged:
            try:
                verify(final)
                return False
            except CheckpointError as error:
                logger.warning("%s; it is written again", error)
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._lock is not None:
            # No other save is pending, so what a failed one could not remove can be removed.
            folders.remove_leftovers(self.directory)
        elif os.path.lexists(partial):
            folders.remove_folder(partial)
        self._check_space(step, final, needed_bytes)
        partial.mkdir()
        return True

    def _check_space(self, step: int, final: Path, needed_bytes: int) -> None:
        """Check the free space; remove what rotation would remove after this step if that gives enough.

        A checkpoint that this process wrote or verified always remains.
        """
        present = folders.list_checkpoints(self.directory)
        doomed = self._to_rotate([*present, step], step)
        room_bytes = sum(path.stat().st_size for old in doomed for path in present[old].rglob("*"))
        is_enough = shutil.disk_usage(self.directory).free + room_bytes >= needed_bytes
        for old in doomed if is_enough and self._good.intersection(present).difference(doomed) else ():
            # A quota is found only by writing: after it was exceeded, one checkpoint is removed.
            if not self._was_full and shutil.disk_usage(self.directory).free >= needed_bytes:
                break
            self._was_full = False
            logger.warning("%s is removed early: there is no space for one more checkpoint", present[old])
            folders.remove_folder(present[old])
        free_bytes = shutil.disk_usage(self.directory).free
        if free_bytes < needed_bytes:
            raise CheckpointError(
                f"{final}: a checkpoint needs {needed_bytes / 1e9:.3f} GB and {free_bytes / 1e9:.3f} GB are free "
                f"in {self.directory}: {(needed_bytes - free_bytes) / 1e9:.3f} GB are missing. Free space there, or "
                f"lower checkpoint.keep_last (now {self._config.keep_last})"
            )

    def _write_own(self, step: int, taken: Future[Write]) -> RankResult:
        _, partial = self._folders(step)
        try:
            write = taken.result()
            folders.wait_until(partial.is_dir, partial, "was made by rank 0")
            return RankResult(written=write(partial))
        except (OSError, CtxlmError) as error:
            return RankResult(error=folders.explain(error), disk_full=is_full_disk(error))
        except Exception as error:
            logger.exception("writing %s failed on rank %d", partial, self._topology.rank)
            return RankResult(error=f"{type(error).__name__}: {error}")

    def _complete(self, step: int, gathered: list[RankResult], finish: Finish, started_s: float) -> None:
        """Write the other files, the manifest and the names, on rank 0, after all ranks have written."""
        final, partial = self._folders(step)
        try:
            self._was_full = any(result.disk_full for result in gathered)
            for rank, result in enumerate(gathered):
                if result.error is not None:
                    raise CheckpointError(_failure(step, rank, result.error))
            finish(partial, [result.written.value for result in gathered])
            # The ranks have flushed the files that they list.
            seal(partial, step, {name: entry for result in gathered for name, entry in result.written.files.items()})
            self._check_lock()
            if final.exists():
                folders.remove_folder(final)
            os.rename(partial, final)
            fsync_path(self.directory)
        except RunLockedError:
            # The folder of that name belongs to another job now.
            raise
        except BaseException as error:
            self._was_full |= is_full_disk(error)
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._damaged.discard(step)
        self._move_latest(final)
        logger.info("saved %s in %.1f s", final, time.monotonic() - started_s)
        self._rotate(step)

    def _move_latest(self, final: Path) -> None:
        try:
            write_text(self.directory / folders.LATEST_NAME, final.name + "\n")
            if (ledger := final / LEDGER_NAME).is_file():
                write_text(self.directory.parent / LEDGER_NAME, ledger.read_text(encoding="utf-8"))
        except OSError as error:
            why = folders.explain(error)
            logger.warning("%s is complete, but %s could not be moved: %s", final, folders.LATEST_NAME, why)

    def _rotate(self, newest: int) -> None:
        try:
            present = folders.list_checkpoints(self.directory)
            for step in self._to_rotate(list(present), newest):
                folders.remove_folder(present[step])
        except OSError as error:
            logger.warning("could not remove an old checkpoint: %s", folders.explain(error))

    def _to_rotate(self, steps: list[int], newest: int) -> list[int]:
        config, at = self._config, {step: self.directory / folders.step_name(step) for step in steps}
        doomed = folders.to_rotate(steps, newest, config.keep_last, config.keep_every_steps, self._damaged)
        return [step for step in doomed if step in self._damaged or reached_words(at[step]) == 0]


def _failure(step: int, rank: int, reason: str) -> str:
    return (
        f"the checkpoint of step {step} could not be written (rank {rank}): {reason}. Older checkpoints are untouched"
    )
