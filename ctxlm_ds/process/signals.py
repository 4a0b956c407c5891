"""The signals that ask a run to stop: SIGTERM (a launcher, Slurm), SIGUSR1 (Slurm ahead of the limit), Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from ctxlm_ds.process.run_files import say
from ctxlm_ds.process.run_history import in_job

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
interrupted = threading.Event()  # Ctrl-C has come: launchers that end now are no news


class StopSignal:
    """A request to stop.

    Training ends at the next micro-batch and saves. A second Ctrl-C ends the process immediately, and so does the first
    one while the process is still `starting`: there is nothing to save. Install it before torch is imported: until then
    SIGUSR1 ends the process.
    """

    def __init__(self) -> None:
        self.requested = False
        self.starting = False
        self.name: str | None = None
        """Name of the signal that came first, such as SIGTERM; None if none came."""
        self.make_room: Callable[[], bool] = lambda: True
        """Called before the line about the stop is written; False leaves it to the caller of `announce`."""
        self.second_interrupts: tuple[int, ...] = (signal.SIGINT,)
        """Signals by which the launcher passes on a second Ctrl-C."""
        self._interrupts = 0

    @property
    def number(self) -> int:
        """The signal's number; 0 if none came."""
        return int(signal.Signals[self.name or "SIGTERM"]) if self.requested else 0

    def install(self) -> StopSignal:
        """Handle the signals from now on (main thread only)."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT or (self.name == "SIGINT" and number in self.second_interrupts):
            interrupted.set()
            self._interrupts += 1
            if self._interrupts > 1 or self.starting:
                self.name = "SIGINT"
                raise KeyboardInterrupt
        if self.requested:
            return
        self.requested = True
        self.name = signal.Signals(number).name
        if os.environ.get("RANK", "0") == "0" and self.make_room():
            self.announce()

    def announce(self) -> None:
        """Write the line about the stop."""
        # The terminal's cursor may be behind the ^C; a job's log has the time of each line.
        begin = "\n" if os.isatty(2) else time.strftime("%H:%M:%S ") if in_job() else ""
        what = "before the first step" if self.starting else "the last complete step is saved"
        advice = "; Ctrl-C again ends it immediately" if self.name == "SIGINT" and not in_job() else ""
        say(f"{'' if advice else f'{self.name}: '}stopping: {what}{advice}", begin)
