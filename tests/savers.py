"""A saver that writes nothing, for tests of when the training loop saves, and one save to its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ctxlm_ds.checkpoint.folders import step_name
from ctxlm_ds.checkpoint.manager import CheckpointManager, Finish, Write
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.training.loop.state import TrainState


def save_now(
    manager: CheckpointManager, step: int, write: Write, finish: Finish, needed_bytes: int = 0, beside: bool = False
) -> Path:
    """The folder of a complete checkpoint; `beside`: written in threads of their own, as beside training."""
    pending = manager.begin(step, lambda: write, finish, needed_bytes, beside)
    while pending is not None and not pending.over:
        pending.advance()
    return manager.directory / step_name(step)


class RecordingSaver:
    """Tells `on_save` the step of each save; each takes `parts` collective parts beyond its beginning.

    `fails(step)` says whether a save of that step fails, in its last part.
    """

    def __init__(
        self, on_save: Callable[[int], None], parts: int = 0, fails: Callable[[int], bool] = lambda step: False
    ) -> None:
        self._on_save = on_save
        self._parts = parts
        self._fails = fails
        self._step = -1
        self._left = 0
        self.busy = False
        self.began_s = 0.0
        self.good: str | None = None

    @property
    def over(self) -> bool:
        return self._left <= 0

    def begin(self, state: TrainState) -> Any:
        """It is its own pending save."""
        assert self.over
        self._step, self._left = state.step, self._parts
        self._end_if_last()
        return None if self.over else self

    def advance(self) -> None:
        self._left -= 1
        self._end_if_last()

    def save(self, state: TrainState) -> None:
        assert self.over
        self._step, self._left = state.step, 0
        self._end_if_last()

    def _end_if_last(self) -> None:
        if self._left:
            return
        if self._fails(self._step):
            raise CheckpointError(f"step {self._step} could not be written")
        self.good = f"step-{self._step}"
        self._on_save(self._step)

    def abandon(self) -> None:
        self._left = 0

    def wait_for_threads(self, seconds: float) -> None:
        pass

    def last_good(self) -> str | None:
        return self.good
