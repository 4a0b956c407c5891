"""A checkpoint on its way: every rank writes its files, then rank 0 adds the rest and gives it its name.

Both parts may run in threads beside the training. What needs all ranks (gathering what each wrote, telling all how it
ended) is done by `advance`, which the ranks call together. In: what to do in each part. Out: one fate on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ctxlm_ds.checkpoint.background_task import Work
from ctxlm_ds.checkpoint.manifest import FileEntry
from ctxlm_ds.parallel.topology import Topology


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
        self._writing = Work(write, f"write-step-{step}", beside)
        self._completing: Work[None] | None = None

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
                self._completing = Work(lambda: self._complete(gathered), f"complete-step-{self.step}", self._beside)
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
