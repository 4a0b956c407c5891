"""One checkpoint that is being written: every rank writes its files, then rank 0 adds the rest and renames the folder.

Both parts may run in background threads. What needs all ranks (gathering what each wrote, reporting how it ended) is
done by `advance`, which the ranks call together, so that no thread holds a collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from ctxlm_ds.checkpoint.manifest import FileEntry
from ctxlm_ds.parallel.topology import Topology

T = TypeVar("T")


@dataclass(frozen=True)
class RankResult:
    """What one rank wrote: its files, what its function returned, or why it failed."""

    rank: int
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    value: Any = None
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

    Args:
        step: optimizer step.
        topology: of all ranks.
        write: this rank's part; it raises nothing.
        complete: rank 0's part, with what every rank's `write` returned.
        report: runs an action on rank 0 and raises its error on every rank (a collective).
        background: True if the parts run in threads.
    """

    def __init__(
        self,
        step: int,
        topology: Topology,
        write: Callable[[], RankResult],
        complete: Callable[[list[RankResult]], None],
        report: Callable[[Callable[[], None]], None],
        background: bool,
    ) -> None:
        self.step = step
        self.began_s = time.monotonic()
        self._topology = topology
        self._complete = complete
        self._report = report
        self._background = background
        self._stage: Literal["writing", "completing", "over"] = "writing"
        self._writing = run_action(write, f"write-step-{step}", background)
        self._completing: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Return whether a thread of this rank is working."""
        if self._stage == "writing":
            return not self._writing.done()
        return self._completing is not None and not self._completing.done()

    @property
    def over(self) -> bool:
        """Return whether the checkpoint is complete or has failed; the same on every rank."""
        return self._stage == "over"

    def advance(self) -> None:
        """Do the next collective part, and wait for a rank that is still busy.

        Raises:
            CheckpointError, RunLockedError: the save failed; the same on every rank, and the save is over.
        """
        if self._stage == "writing":
            gathered = self._topology.gather_object(self._writing.result())
            if gathered is not None:
                self._completing = run_action(
                    lambda: self._complete(gathered), f"complete-step-{self.step}", self._background
                )
            self._stage = "completing"
        elif self._stage == "completing":
            self._stage = "over"
            self._report(lambda: self._completing.result() if self._completing is not None else None)

    def wait(self) -> None:
        """Advance to the end."""
        while not self.over:
            self.advance()

    def wait_for_threads(self, seconds: float) -> None:
        """Wait at most `seconds` for this rank's threads to end; no collective."""
        threads: Sequence[Future[Any]] = [self._completing or self._writing]
        wait_for_futures(threads, seconds)
