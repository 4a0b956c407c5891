"""Signals to the job itself: USR1 ahead of the time limit, TERM at its end. Noted here; job.py acts on them."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
EARLY_VARIABLE = "CTXLM_NOTICE"


class Notices:
    """What has been asked of the job. Install it before anything slow: until then the signals are lost."""

    def __init__(self) -> None:
        self.name = "a signal at the job's beginning" if os.environ.pop(EARLY_VARIABLE, "") else ""
        """The signal that came last; empty while none came."""
        self.count = 1 if self.name else 0

    def __bool__(self) -> bool:
        return bool(self.count)

    def install(self) -> Notices:
        """Handle the signals from now on (main thread only)."""
        for number in SIGNALS:
            signal.signal(number, self._handle)
        return self

    def sleep(self, seconds: float) -> None:
        """Wait, but no longer than until a signal comes."""
        end_s, count = time.monotonic() + seconds, self.count
        while time.monotonic() < end_s and self.count == count:
            time.sleep(min(0.1, seconds))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self.count += 1
