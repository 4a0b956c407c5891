"""Ends a run that makes no progress: every rank leaves its threads' stacks, one file joins them, the exit status is 4.

The guard (guard.py) counts the time, collects the stacks, and lets this process end itself, from its beginning on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import math
import os
import select
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from ctxlm_ds.errors import EXIT_HANG
from ctxlm_ds.process.guard import DUMP_SIGNAL, MARK_VARIABLE, GuardFacts
from ctxlm_ds.process.launch import RankInfo
from ctxlm_ds.process.launcher import local_deepspeed_command
from ctxlm_ds.process.run_history import attempt_folder, clear_evidence
from ctxlm_ds.recipe.schema import WatchdogConfig

logger = logging.getLogger("ctxlm_ds")
T = TypeVar("T")

SECONDS_PER_MINUTE = 60.0
POLLS_PER_LIMIT = 20
SHORTEST_POLL_S, LONGEST_POLL_S = 0.05, 5.0
REPORT_S = 5.0  # longest time between two reports of threads and checkpoints
DISMISS_S = 5.0


class Watchdog:
    """Watches this rank inside a `with` statement; a limit of null is switched off."""

    def __init__(self, config: WatchdogConfig, run_dir: Path, ranks: RankInfo) -> None:
        start, step, save = config.start_minutes, config.step_minutes, config.save_minutes
        minutes = {"start": start, "training": step, "evaluation": step, "saving": save, "end": save}
        self._limits_s = {
            name: math.inf if value is None else value * SECONDS_PER_MINUTE for name, value in minutes.items()
        }
        self._poll_s = min(LONGEST_POLL_S, max(SHORTEST_POLL_S, min(self._limits_s.values()) / POLLS_PER_LIMIT))
        self._folder = attempt_folder(run_dir)
        self._ranks = ranks
        self.writing_age_s: Callable[[], float | None] = lambda: None
        """Returns the seconds since an incomplete checkpoint was begun; `save_minutes` holds for these as well."""
        self._phase = "start"
        self._step: int | None = None
        self._began_unix_s = time.time()
        # faulthandler needs its file open before anything goes wrong.
        self._scratch = os.memfd_create("stacks")
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Watchdog:
        # Registered in C, so that they answer while Python cannot run: crashes, and a request from outside.
        faulthandler.enable(file=self._scratch)
        faulthandler.register(DUMP_SIGNAL, file=self._scratch)
        silences = self._ranks.launcher == "deepspeed" and self._ranks.local_rank == 0
        environ = {name: value for name, value in os.environ.items() if name != MARK_VARIABLE}
        os.environ[MARK_VARIABLE] = uuid.uuid4().hex
        facts = GuardFacts(
            str(self._folder.absolute()), self._ranks.rank, self._ranks.world_size, os.getpid(),
            threading.main_thread().ident or 0, self._scratch, self._began_unix_s, self._poll_s,
            self._limits_s["saving"], os.environ[MARK_VARIABLE], local_deepspeed_command() if silences else 0,
        )  # fmt: skip
        words = [sys.executable, "-m", "ctxlm_ds.process.guard", json.dumps(asdict(facts))]
        try:
            self._guard = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(self._scratch,), env=environ
            )
        except OSError as error:
            logger.warning("this rank runs without a watchdog: %s", error)
            return self
        assert self._guard.stdin is not None and self._guard.stdout is not None
        os.set_blocking(self._guard.stdin.fileno(), False)
        self.beat()
        threading.Thread(target=self._serve, args=(self._guard.stdout.fileno(),), name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._tell(bye=True)
        if self._guard is not None:
            with contextlib.suppress(subprocess.TimeoutExpired, OSError):
                self._guard.wait(DISMISS_S)
        faulthandler.unregister(DUMP_SIGNAL)
        faulthandler.disable()
        os.close(self._scratch)

    def clear_old_evidence(self) -> None:
        """Remove the evidence of an earlier start in the same folder; only under the run's lock."""
        clear_evidence(self._folder, self._began_unix_s)

    def beat(self, phase: str | None = None, step: int | None = None) -> None:
        """Note progress, in this phase or in the one before."""
        self._phase = self._phase if phase is None else phase
        self._step = self._step if step is None else step
        self._tell(phase=self._phase, step=self._step, limit_s=self._limits_s[self._phase])

    def enter(self, phase: str) -> None:
        """Note the phase that begins: training, evaluation or saving."""
        # Until the first step is done a run is still starting, also in the evaluation before it.
        self.beat("start" if self._phase == "start" and phase in ("training", "evaluation") else phase)

    def watched(self, batches: Iterable[T]) -> Iterable[T]:
        """Return the same batches; each one that is taken counts as progress."""
        return _Watched(batches, self)

    def _tell(self, **message: Any) -> None:
        """Send a line to the guard; without effect if the guard has ended."""
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                os.write(self._guard.stdin.fileno(), f"{json.dumps(message)}\n".encode())

    def _serve(self, from_guard: int) -> None:
        """Report what only this process knows, until the guard says that the rank hangs or has ended itself."""
        interval_s = min(REPORT_S, 10 * self._poll_s)
        while True:
            threads = {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}
            self._tell(threads=threads, writing_s=self.writing_age_s() or 0.0)
            if select.select([from_guard], [], [], interval_s)[0]:
                if os.read(from_guard, 1):
                    os._exit(EXIT_HANG)
                return


class _Watched(Generic[T]):
    """Batches that count as progress, as often as they are read."""

    def __init__(self, batches: Iterable[T], watchdog: Watchdog) -> None:
        self._batches = batches
        self._watchdog = watchdog

    def __iter__(self) -> Iterator[T]:
        for batch in self._batches:
            self._watchdog.beat()
            yield batch
