"""The schedule of checkpoints, and retries of saves that failed.

All ranks call these methods together. They agree in the all-reduce of each step which rank is still writing, and
whether a save is due by any rank's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Protocol

from ctxlm_ds.console import logger
from ctxlm_ds.errors import CheckpointError, CtxlmError
from ctxlm_ds.recipe.schema import CheckpointConfig
from ctxlm_ds.training.hooks.hooks import Phase
from ctxlm_ds.training.loop.state import TrainState

RETRY_S = 60.0
RETRIES_PER_INTERVAL = 10
LAST_SAVE_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
GIVE_UP_S = 5.0
NO_STEP = -1


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
        wait([self._work], seconds)


class Saver(Protocol):
    """Writes checkpoints; all ranks call its methods together, but `abandon` and `last_good`.

    Methods raise CheckpointError on every rank if a checkpoint could not be written; none is pending then.
    """

    def begin(self, state: TrainState) -> PendingSave | None:
        """Copy this state and begin to write it; None if the save is complete on return."""

    def save(self, state: TrainState) -> None:
        """Write a checkpoint of this state, complete on return."""

    def abandon(self) -> None:
        """End this rank's writing with an error."""

    def last_good(self) -> str | None:
        """Return the newest checkpoint known to be intact."""


class Saves:
    """The saves of one run.

    `record_failure` records step and reason of a failed save; it returns False if it must be called again later.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        saver: Saver,
        record_failure: Callable[[int, str], bool] = lambda step, reason: True,
    ) -> None:
        self._config = config
        self.saver = saver
        self.pending: PendingSave | None = None
        """The save under way, on every rank or on none."""
        self._record_failure = record_failure
        self._tell_phase: Callable[[Phase], None] = lambda phase: None
        self._now_step = self._begun_step = self._saved_step = self._failed_step = NO_STEP
        self._due_s = self._failed_s = time.monotonic()
        self._late = self._retry = self._busy = False
        """True on every rank if it is true on any: interval_minutes or RETRY_S have passed, or a rank still writes."""
        self._is_due = False
        """True if the save that was begun last was due, false for a retry."""
        self._failed_in_a_row = self._failed_tries = 0
        self._unrecorded: list[tuple[int, str]] = []

    def start(self, step: int, tell_phase: Callable[[Phase], None]) -> None:
        """Begin a run, or resume it from the checkpoint of `step`."""
        self._tell_phase = tell_phase
        self._begun_step = self._saved_step = step or NO_STEP
        self._due_s = time.monotonic()

    # Agreement over all ranks, once a step.

    def flags(self) -> list[float]:
        """Return this rank's flags for the step's all-reduce."""
        now_s = time.monotonic()
        minutes = self._config.interval_minutes
        late = minutes is not None and now_s - self._due_s >= minutes * 60
        retry = self._failed_step != NO_STEP and now_s - self._failed_s >= RETRY_S
        return [float(late), float(retry), float(self.pending is not None and self.pending.busy)]

    def agree(self, flags: Sequence[float]) -> None:
        """Take the sums over all ranks."""
        self._late, self._retry, self._busy = map(bool, flags)

    # Between two steps.

    def after_step(self, state: TrainState) -> None:
        """Complete the pending save if every rank has written, and begin the one that is due.

        Raises CheckpointError if more saves in a row failed than `max_failed_saves`.
        """
        self._now_step = state.step
        if self.pending is not None and not self._busy:
            with self._saving():
                self._attempt(self._advance, limited=True)
        is_due = state.step % self._config.interval_steps == 0 or self._late or state.reached_words > 0
        is_retry = self._retry_due(state.step) and self.pending is None
        if self._begun_step != state.step and (is_due or is_retry):
            with self._saving():
                self._begin(state, is_due)

    def last(self, state: TrainState) -> None:
        """Write a checkpoint of this state, complete on return, with retries.

        Raises CheckpointError, which names the last good checkpoint, if it could not be written.
        """
        with self._saving():
            self._finish(limited=False)
            if self._saved_step == state.step:
                return
            self._is_due = True
            self._begun_step = state.step
            for pause_s in (*LAST_SAVE_PAUSES_S, None):
                self._tell_phase("saving")
                try:
                    self.saver.save(state)
                    return self._succeeded()
                except CheckpointError as error:
                    if pause_s is None:
                        self._failed(error, limited=False)
                        raise CheckpointError(f"{error}. {self._how_to_resume()}") from error
                    logger.warning("%s. Trying again in %.0f s", error, pause_s)
                    time.sleep(pause_s)

    def settle(self) -> None:
        """Wait until no save is pending; one that fails is a warning."""
        if self.pending is not None:
            with self._saving():
                self._finish(limited=False)

    def pending_age_s(self) -> float | None:
        """Return the seconds since the pending save began, from any thread."""
        pending = self.pending
        return None if pending is None else time.monotonic() - pending.began_s

    def abandon(self) -> None:
        """Stop this rank's writing before the process ends; no collective."""
        self.saver.abandon()
        if self.pending is not None:
            self.pending.wait_for_threads(GIVE_UP_S)

    def rolled_back(self, step: int) -> None:
        """Continue from the checkpoint of `step`, to which the run went back."""
        self._now_step = self._begun_step = self._saved_step = step
        self._due_s = time.monotonic()
        if self._failed_step != NO_STEP:
            self._failed_step = step

    # Parts of a save.

    def _begin(self, state: TrainState, is_due: bool) -> None:
        # The disk may be slower than the interval.
        self._finish(limited=True)
        self._is_due = is_due
        self._begun_step = state.step
        if is_due:
            self._due_s = time.monotonic()
        self._attempt(lambda: self._start_save(state), limited=True)

    def _start_save(self, state: TrainState) -> None:
        self.pending = self.saver.begin(state)

    def _advance(self) -> None:
        assert self.pending is not None
        try:
            self.pending.advance()
        finally:
            if self.pending.over:
                self.pending = None

    def _finish(self, limited: bool) -> None:
        while self.pending is not None:
            self._attempt(self._advance, limited)

    def _attempt(self, action: Callable[[], None], limited: bool) -> None:
        """Do a part of a save; if `limited`, too many failures in a row end the run."""
        try:
            action()
        except CheckpointError as error:
            self._failed(error, limited)
        else:
            if self.pending is None:
                self._succeeded()

    def _succeeded(self) -> None:
        self._saved_step = self._begun_step
        self._failed_step, self._failed_in_a_row, self._failed_tries = NO_STEP, 0, 0
        self._unrecorded = [failure for failure in self._unrecorded if not self._record_failure(*failure)]

    def _failed(self, error: CheckpointError, limited: bool) -> None:
        step, reason = self._begun_step, str(error)
        self._failed_step, self._failed_s = max(step, self._now_step), time.monotonic()
        self._failed_tries += 1
        if not self._is_due:
            return
        self._failed_in_a_row += 1
        if not self._record_failure(step, reason):
            self._unrecorded.append((step, reason))
        limit = self._config.max_failed_saves
        count = f"{self._failed_in_a_row} due saves and {self._failed_tries} tries in a row failed"
        if not limited:
            logger.warning("%s. %s", reason, count)
        elif self._failed_in_a_row <= limit:
            logger.warning(
                "%s. %s: training continues and tries again soon (checkpoint.max_failed_saves %d)", reason, count, limit
            )
        else:
            raise CheckpointError(
                f"{reason}. {count} (checkpoint.max_failed_saves {limit}): training stops. {self._how_to_resume()}"
            ) from error

    def _how_to_resume(self) -> str:
        good = self.saver.last_good()
        return f"The last good checkpoint is {good}; the same command resumes from it" if good else "There is none yet"

    def _retry_due(self, step: int) -> bool:
        """Return whether to retry a failed save: after part of an interval, or a minute by any rank's clock."""
        pause_steps = max(1, self._config.interval_steps // RETRIES_PER_INTERVAL)
        return self._failed_step != NO_STEP and (self._retry or step - self._failed_step >= pause_steps)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        self._tell_phase("saving")
        yield
        self._tell_phase("training")
