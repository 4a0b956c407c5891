"""A checkpoint on its way: every rank writes its files, then rank 0 adds the rest and gives it its name.

Both parts may run in threads beside the training (BackgroundWork). What needs all ranks (gathering what each wrote,
reporting how it ended) is done by `advance`, which the ranks call together. In: what to do in each part.
Out: one fate on all ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, cast

from ctxlm_ds.checkpoint.manifest import FileEntry
from ctxlm_ds.parallel.topology import Topology

T = TypeVar("T")


class BackgroundWork(Generic[T]):
    """A function that runs beside the caller.

    The thread does not keep the process alive: a disk that hangs must not hold up the end of a run.

    Args:
        action: the function; it must hold no collective.
        name: of the thread, for stacks.
        beside: False runs it before the constructor returns.
    """

    def __init__(self, action: Callable[[], T], name: str, beside: bool) -> None:
        self._action = action
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if beside:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        else:
            try:
                self._result = action()
            except Exception as error:
                self._error = error

    def _run(self) -> None:
        try:
            self._result = self._action()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> T:
        """What the function returned; what it raised is raised here."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return cast("T", self._result)

    def wait_at_most(self, seconds: float) -> None:
        """Wait for the end of the thread, but no longer."""
        if self._thread is not None:
            self._thread.join(seconds)


@dataclass(frozen=True)
class Written:
    """What one rank did: its files, what its `write` returned, or why it failed."""

    rank: int
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    value: Any = None
    error: str | None = None
    disk_full: bool = False
    """Whether the error is want of room."""


class PendingSave:
    """One checkpoint between its beginning and its end.

    Args:
        step: optimizer step.
        topology: of all ranks.
        write: this rank's part; it raises nothing.
        complete: rank 0's part, with what every rank's `write` returned.
        tell: runs an action on rank 0 and raises its error on every rank (a collective).
        beside: whether the parts run in threads.
    """

    def __init__(
        self,
        step: int,
        topology: Topology,
        write: Callable[[], Written],
        complete: Callable[[list[Written]], None],
        tell: Callable[[Callable[[], None]], None],
        beside: bool,
    ) -> None:
        self.step = step
        self.began_s = time.monotonic()
        self._topology = topology
        self._complete = complete
        self._tell = tell
        self._beside = beside
        self._stage: Literal["writing", "completing", "over"] = "writing"
        self._writing = BackgroundWork(write, f"write-step-{step}", beside)
        self._completing: BackgroundWork[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a thread of this rank is at work."""
        if self._stage == "writing":
            return not self._writing.done
        return self._completing is not None and not self._completing.done

    @property
    def over(self) -> bool:
        """Whether the checkpoint is complete, or has failed; alike on every rank."""
        return self._stage == "over"

    def advance(self) -> None:
        """The next collective part; a rank that is still busy is waited for.

        Raises:
            CheckpointError, RunLockedError: the save failed, on every rank alike; it is over.
        """
        if self._stage == "writing":
            gathered = self._topology.gather_object(self._writing.wait())
            if gathered is not None:
                self._completing = BackgroundWork(
                    lambda: self._complete(gathered), f"complete-step-{self.step}", self._beside
                )
            self._stage = "completing"
        elif self._stage == "completing":
            self._stage = "over"
            self._tell(lambda: self._completing.wait() if self._completing is not None else None)

    def wait(self) -> None:
        """Advance to the end."""
        while not self.over:
            self.advance()

    def wait_for_threads(self, seconds: float) -> None:
        """Give this rank's threads a moment to end; no collective."""
        self._writing.wait_at_most(seconds)
        if self._completing is not None:
            self._completing.wait_at_most(seconds)
