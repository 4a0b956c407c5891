"""A rank without a model, for test_failure_watchdog: `python watched_rank.py RUN_DIR RANK WORLD_SIZE LIMITS WHAT`."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path

from ctxlm_ds.process import failure as module
from ctxlm_ds.process.failure import Watchdog, Watched
from ctxlm_ds.process.launch import RankInfo
from ctxlm_ds.recipe.schema import RunConfig, WatchdogConfig
from ctxlm_ds.training.hooks.hooks import RunStart, StepMetrics
from ctxlm_ds.training.hooks.status import WatchdogHook


def metrics(step: int) -> StepMetrics:
    return StepMetrics(step, 1.0, {}, {}, 0.1, None, 10, 10, 0.1, 0.1, 0)


def stand_here() -> None:
    time.sleep(1000)


def stand_elsewhere() -> None:
    time.sleep(1000)


def begin(watchdog: Watchdog) -> WatchdogHook:
    hook = WatchdogHook(watchdog)
    hook.on_run_start(RunStart(0, 100, RunConfig()))
    hook.on_step_end(metrics(1))
    return hook


def hang(watchdog: Watchdog) -> None:
    begin(watchdog)
    stand_here()


def hang_elsewhere(watchdog: Watchdog) -> None:
    begin(watchdog)
    stand_elsewhere()


def hang_at_start(watchdog: Watchdog) -> None:
    stand_here()


def go_on(watchdog: Watchdog) -> None:
    """Nothing takes longer than its limit (1.8 s a step or batch, 30 s a save); all of it together takes longer."""
    hook = begin(watchdog)
    for step in range(2, 6):
        time.sleep(0.5)
        hook.on_step_end(metrics(step))
    hook.on_phase("evaluation")
    for _ in Watched(range(4), watchdog):
        time.sleep(0.5)
    hook.on_phase("training")
    hook.on_phase("saving")
    time.sleep(2.2)
    hook.on_phase("training")


def pause(watchdog: Watchdog) -> None:
    """Goes on for a while in short steps, and is stopped meanwhile."""
    hook = begin(watchdog)
    Path(os.environ["READY"]).touch()
    for step in range(2, 40):
        time.sleep(0.1)
        hook.on_step_end(metrics(step))


def hold(watchdog: Watchdog) -> None:
    """C code that holds the interpreter."""
    hook = begin(watchdog)
    for step in range(2, 5):  # until the limit is that of a step
        time.sleep(0.1)
        hook.on_step_end(metrics(step))
    mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def crash(watchdog: Watchdog) -> None:
    ctypes.string_at(0)


def wait(watchdog: Watchdog) -> None:
    begin(watchdog)
    Path(os.environ["READY"]).touch()
    stand_here()


def write(watchdog: Watchdog) -> None:
    """Steps go on while a checkpoint is not finished."""
    hook, begin_s = begin(watchdog), time.monotonic()
    watchdog.writing_age_s = lambda: time.monotonic() - begin_s
    for step in range(2, 200):
        time.sleep(0.1)
        hook.on_step_end(metrics(step))


def main() -> None:
    folder, rank, world_size, limits, what = sys.argv[1:]
    module.HELD_S = 8.0 if what == "hold" else 25.0
    module.GRACE_S = 5.0 if world_size == "2" else 15.0  # the other one never leaves stacks
    ranks = RankInfo(int(rank), int(world_size), int(rank), int(world_size), "127.0.0.1", 1, "environment", 0)
    with Watchdog(WatchdogConfig(**json.loads(limits)), Path(folder), ranks) as watchdog:
        globals()[what](watchdog)


if __name__ == "__main__":
    main()
