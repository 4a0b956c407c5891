"""Ends a run that makes no progress: every rank leaves its threads' stacks, one file joins them, the exit status is 4.

In: limits by phase, and the trainer's events (training/watchdog_hook.py). Out: RUN/attempts/ATTEMPT/stacks.txt. It
covers a start from before torch is imported. The limits are for what the ranks do together: when one hangs all of them
wait, and each finds out by itself without a message. Not here: a rank none of whose threads can run (guard.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from ctxlm_ds.atomic import write_text
from ctxlm_ds.console import format_duration
from ctxlm_ds.errors import EXIT_HANG
from ctxlm_ds.process.guard import DUMP_SIGNAL, FATAL, GuardFacts, GuardProcess, mark_children
from ctxlm_ds.process.launch import RankInfo
from ctxlm_ds.process.launcher import local_deepspeed_command
from ctxlm_ds.process.run_history import FailureRecord, attempt_folder, clear_evidence, write_record
from ctxlm_ds.process.stacks import (
    ALL_STACKS_NAME,
    STACKS_GLOB,
    answering_ranks,
    describe_ranks,
    likely_culprits,
    name_threads,
    open_scratch,
    read_scratch,
    read_stacks,
    stacks_name,
    write_joined,
)
from ctxlm_ds.recipe.schema import WatchdogConfig

logger = logging.getLogger("ctxlm_ds")
T = TypeVar("T")

SECONDS_PER_MINUTE = 60.0
GRACE_S = 15.0
"""How long a rank waits for the stacks of the others."""
JOINING_S = 5.0
"""And then for the rank that joins them."""
EVIDENCE_S = 30.0
"""How long leaving evidence may take in all, because the run directory may be what hangs."""
POLLS_PER_LIMIT = 20
SHORTEST_POLL_S, LONGEST_POLL_S = 0.05, 5.0
SUSPICION = 0.25
"""Share of its limit after which a rank follows another that has reached its."""


class Watchdog:
    """Watches this rank inside a `with` statement; a limit of null is switched off."""

    def __init__(self, config: WatchdogConfig, run_dir: Path, ranks: RankInfo) -> None:
        start, step, save = config.start_minutes, config.step_minutes, config.save_minutes
        minutes = {"start": start, "training": step, "evaluation": step, "saving": save, "end": save}
        self._limits = {
            name: math.inf if value is None else value * SECONDS_PER_MINUTE for name, value in minutes.items()
        }
        shortest_s = min(self._limits.values())
        self._poll_s = min(LONGEST_POLL_S, max(SHORTEST_POLL_S, shortest_s / POLLS_PER_LIMIT))
        self._folder = attempt_folder(run_dir)
        self._ranks = ranks
        self._writing_age_s: Callable[[], float | None] = lambda: None
        self._phase = "start"
        self._step: int | None = None
        self._beats = 0
        self._began_unix_s = time.time()
        self._scratch = open_scratch()
        self._read_bytes = 0
        self._done = threading.Event()
        self._guard: GuardProcess | None = None
        self._helper: threading.Thread | None = None
        self._others_hang = False
        self._allowing = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        # Registered in C, so that they answer while Python cannot run: crashes, and a request from outside.
        faulthandler.enable(file=self._scratch)
        faulthandler.register(DUMP_SIGNAL, file=self._scratch)
        main_thread = threading.main_thread().ident or 0
        ranks = (self._ranks.rank, self._ranks.world_size)
        silences = self._ranks.launcher == "deepspeed" and self._ranks.local_rank == 0
        facts = GuardFacts(
            str(self._folder.absolute()), *ranks, os.getpid(), main_thread, self._scratch, mark_children(),
            local_deepspeed_command() if silences else 0,
        )  # fmt: skip
        try:
            self._guard = GuardProcess(facts)
        except OSError as error:
            logger.warning("this rank runs without a guard against hanging in C code: %s", error)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        if self._guard is not None:
            self._guard.dismiss()
        faulthandler.unregister(DUMP_SIGNAL)
        faulthandler.disable()
        os.close(self._scratch)

    def clear_old_evidence(self) -> None:
        """Remove the evidence of an earlier start in the same folder; only under the run's lock."""
        clear_evidence(self._folder, self._began_unix_s)

    def beat(self, phase: str | None = None, step: int | None = None) -> None:
        """Note progress, in this phase or in the one before."""
        phase = self._phase if phase is None else phase
        shorter = self._limits[phase] < self._limits[self._phase]
        self._phase = phase
        self._step = self._step if step is None else step
        self._beats += 1
        if shorter:
            # Immediately: stopped before the thread's next turn, the rank would have the hours of its former phase.
            self._allow_phase(0.0)

    def enter(self, phase: str) -> None:
        """Note the phase that begins: training, evaluation or saving."""
        # Until the first step is done a run is still starting.
        self.beat("start" if self._phase == "start" and phase == "training" else phase)

    def watched(self, batches: Iterable[T]) -> Iterable[T]:
        """Return the same batches; each one that is taken counts as progress."""
        return _Watched(batches, self)

    def watch_writing(self, age_s: Callable[[], float | None]) -> None:
        """Apply `save_minutes` to checkpoints that are written during training, too.

        `age_s` gives the seconds since an incomplete checkpoint was begun; None without one.
        """
        self._writing_age_s = age_s

    def _watch(self) -> None:
        seen, still_s, written_s, last_s = -1, 0.0, 0.0, time.monotonic()
        while True:
            self._allow_phase(still_s if self._beats == seen else 0.0)
            if self._done.wait(self._poll_s):
                return
            # Time in which this thread did not run (a suspended job or machine) does not count.
            now_s = time.monotonic()
            passed_s, last_s = min(now_s - last_s, 3 * self._poll_s), now_s
            still_s = 0.0 if self._beats != seen else still_s + passed_s
            seen = self._beats
            self._answer()
            limit_s = self._limits[self._phase]
            if still_s >= SUSPICION * limit_s:
                self._in_thread(self._look_for_others)
            if still_s >= limit_s or (still_s >= SUSPICION * limit_s and self._others_hang):
                self._end(f"no progress for {format_duration(still_s)}")
            age_s = self._writing_age_s()
            written_s = 0.0 if age_s is None else min(age_s, written_s + passed_s)
            if written_s >= self._limits["saving"]:
                self._end(f"a checkpoint has been on its way to the disk for {format_duration(written_s)}")

    def _allow_phase(self, still_s: float) -> None:
        """Send the guard what is left of this phase's limit, one at a time, so that a longer one never comes later."""
        with self._allowing:
            self._allow(self._limits[self._phase] - still_s + 2 * self._poll_s + 1.0)

    def _allow(self, seconds: float) -> None:
        if self._guard is not None:
            self._guard.allow(seconds)

    def _in_thread(self, action: Callable[[], object]) -> None:
        """Touch the run directory in another thread, because it may be what hangs; one action at a time."""
        if self._helper is None or not self._helper.is_alive():
            self._helper = threading.Thread(target=action, name="watchdog-files", daemon=True)
            self._helper.start()

    def _look_for_others(self) -> None:
        """Note if another rank has left its stacks: its limit may have been a shorter one."""
        own = stacks_name(self._ranks.rank)
        with contextlib.suppress(OSError):
            others = [path for path in self._folder.glob(STACKS_GLOB) if path.name != own]
            self._others_hang = any(path.stat().st_mtime >= self._began_unix_s for path in others)

    def _answer(self) -> None:
        """Keep the stacks that were requested by DUMP_SIGNAL; a loader worker writes to the same file."""
        text = read_scratch(self._scratch, self._read_bytes)
        if text:
            self._read_bytes = os.fstat(self._scratch).st_size
            path = self._folder / f"asked-{stacks_name(self._ranks.rank)}"
            facts = self._facts("a child of this process crashed" if FATAL in text else "asked for by a signal")
            self._in_thread(lambda: self._keep(path, facts, text))

    def _keep(self, path: Path, facts: str, text: str) -> bool:
        names = {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}
        try:
            write_text(path, f"{facts}\n\n{name_threads(text, names)}")
        except OSError as error:
            logger.error("the stacks could not be written to %s: %s", path, error)
            return False
        return True

    def _facts(self, why: str) -> str:
        where = self._phase if self._step is None else f"{self._phase}, after step {self._step}"
        ranks = self._ranks
        return (
            f"rank {ranks.rank} of {ranks.world_size} on {socket.gethostname()} (process {os.getpid()}): {where}, {why}"
        )

    def _end(self, why: str) -> None:
        self._allow(EVIDENCE_S)
        evidence = threading.Thread(target=self._leave_evidence, args=(why,), daemon=True)
        evidence.start()
        evidence.join(EVIDENCE_S)
        if self._guard is not None:
            self._guard.leave()
        os._exit(EXIT_HANG)

    def _leave_evidence(self, why: str) -> None:
        facts = self._facts(why)
        faulthandler.dump_traceback(file=self._scratch)
        text = read_scratch(self._scratch, self._read_bytes)
        kept = self._keep(self._folder / stacks_name(self._ranks.rank), facts, text)
        deadline_s = time.monotonic() + (GRACE_S if kept else 0.0)
        while len(read_stacks(self._folder)) < self._ranks.world_size and time.monotonic() < deadline_s:
            time.sleep(self._poll_s)
        texts = read_stacks(self._folder)
        # The lowest rank that can: of a stopped or hung rank only its guard has written.
        if self._ranks.rank == min(answering_ranks(texts), default=self._ranks.rank):
            self._conclude(facts, texts)
            return
        # The first rank to end may make the launcher kill the others.
        while not (self._folder / ALL_STACKS_NAME).exists() and time.monotonic() < deadline_s + JOINING_S:
            time.sleep(self._poll_s)

    def _conclude(self, facts: str, texts: Mapping[int, str]) -> None:
        culprits = likely_culprits(texts, self._ranks.world_size)
        suspicion = f"; look at {describe_ranks(culprits)} first" if culprits else ""
        message = facts.partition("): ")[2] + suspicion
        try:
            message += f"; all ranks' stacks are in {write_joined(self._folder, self._ranks.world_size)}"
        except OSError as error:
            message += f"; the stacks could not be joined: {error}"
        host = socket.gethostname()
        record = FailureRecord(round(time.time(), 3), self._ranks.rank, host, EXIT_HANG, "Hang", message)
        write_record(self._folder, record)
        logger.error("hang: %s; the run ends with status %d", message, EXIT_HANG)


class _Watched(Generic[T]):
    """Batches that count as progress, as often as they are read."""

    def __init__(self, batches: Iterable[T], watchdog: Watchdog) -> None:
        self._batches = batches
        self._watchdog = watchdog

    def __iter__(self) -> Iterator[T]:
        for batch in self._batches:
            self._watchdog.beat()
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
