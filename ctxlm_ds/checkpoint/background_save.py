"""The stages of a checkpoint that is being written, which may run in background threads.

What needs all ranks (gathering what each wrote, reporting how it ended) is done by `PendingSave.advance`, which the
ranks call together, so that no thread holds a collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ctxlm_ds.checkpoint.chunk_index import WrittenFiles
from ctxlm_ds.errors import CtxlmError

T = TypeVar("T")


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


class PendingSave:
    """One checkpoint between its beginning and its end.

    `stages` yields what this rank works on in each stage, and does the collective parts between them.
    """

    def __init__(self, stages: Iterator[Future[Any]]) -> None:
        self.began_s = time.monotonic()
        self.over = False
        """True if the checkpoint is complete or has failed; the same on every rank."""
        self._stages = stages
        self._work = next(stages)

    @property
    def busy(self) -> bool:
        """Return whether this rank is working."""
        return not self._work.done()

    def advance(self) -> None:
        """Do the next collective part, and wait for a rank that is still busy.

        Raises CheckpointError or RunLockedError, the same on every rank, if the save failed and is over.
        """
        try:
            self._work = next(self._stages)
        except StopIteration:
            self.over = True
        except CtxlmError:
            self.over = True
            raise

    def wait_for_threads(self, seconds: float) -> None:
        """Wait at most `seconds` for this rank's threads to end; no collective."""
        wait_for_futures([self._work], seconds)
