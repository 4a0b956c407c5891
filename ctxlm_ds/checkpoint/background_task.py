"""A piece of work in a thread of its own, or at once: the same handle for both."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Work(Generic[T]):
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
