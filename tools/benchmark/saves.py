"""How long training waits for a checkpoint: one that it waits for, and one that is written in the background.

Both kinds save the same states to the same disk, alternately, on one or several ranks.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.process.run_lock import RunLock
from ctxlm_ds.process.signals import StopSignal
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.run import build_run
from ctxlm_ds.training.loop.saves import PendingSave
from ctxlm_ds.training.loop.trainer import Trainer
from tools.benchmark.timing import summary

WAITED, BACKGROUND, FIRST = "training waits", "in the background", "  the first"
COMPLETE, STEP, STEP_DURING_SAVE = "  complete after", "step", "step during a save"
ROWS = (WAITED, BACKGROUND, FIRST, COMPLETE, STEP, STEP_DURING_SAVE)
"""Rows of the table, in seconds of the slowest rank. The first background save also allocates the copies' memory."""


class _SaveBenchmark:
    """Steps and saves of one run."""

    def __init__(self, trainer: Trainer) -> None:
        self._topology, self._engine, self._state = trainer.engine.topology, trainer.engine, trainer.state
        self._steps = iter(trainer.steps)
        self._learning_rate = trainer.start.config.optimizer.learning_rate
        self._checkpoints = trainer.saves.saver
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def run(self, rounds: int, num_steps: int) -> list[str]:
        """Take `num_steps` steps and a save, in the foreground and in the background, `rounds` times each.

        One round before them does not count. Returns the lines of the table.
        """
        for number in range(rounds + 1):
            self._take_steps(num_steps)
            self._seconds[WAITED].append(self._timed(lambda: self._checkpoints.save(self._state)))
            self._take_steps(num_steps)
            self._save_in_background()
            if number == 0:
                first = self._seconds[BACKGROUND]
                self._seconds.clear()
                self._seconds[FIRST] = first
        newest = self._checkpoints.last_good()
        assert newest is not None
        num_bytes = sum(path.stat().st_size for path in Path(newest).rglob("*"))
        table = [f"{'checkpoint':<18}{num_bytes / 1e6:>10,.0f} MB"]
        for name in ROWS:
            if values := self._seconds[name]:
                median, limits = summary(values, "{:.3f}")
                table.append(f"{name:<18}{median:>10} s  ({limits}, {len(values)} times)")
        return table

    def _save_in_background(self) -> None:
        started_s = time.perf_counter()
        begun: list[PendingSave | None] = []
        waited_s = self._timed(lambda: begun.append(self._checkpoints.begin(self._state)))
        pending = begun[0]
        while pending is not None and not pending.over:
            self._seconds[STEP_DURING_SAVE].append(self._timed(self._train))
            if not self._topology.all_reduce_max([float(pending.busy)])[0]:
                waited_s += self._timed(pending.advance)
        self._seconds[COMPLETE].append(time.perf_counter() - started_s)
        self._seconds[BACKGROUND].append(waited_s)

    def _take_steps(self, count: int) -> None:
        self._seconds[STEP] += [self._timed(self._train) for _ in range(count)]

    def _train(self) -> None:
        self._engine.train_step(next(self._steps), self._state.step, self._learning_rate)
        self._state.step += 1

    def _timed(self, action: Callable[[], object]) -> float:
        """Return the seconds of the slowest rank."""
        self._topology.all_reduce_max([0.0])
        started_s = time.perf_counter()
        action()
        return self._topology.all_reduce_max([time.perf_counter() - started_s])[0]


def compare_saves(
    config: RunConfig, deepspeed_config: dict[str, Any], topology: Topology, output_dir: Path, rounds: int, steps: int
) -> list[str]:
    """Return the lines of the table on rank 0, and none on the other ranks.

    Args:
        config: the recipe.
        deepspeed_config: DeepSpeed's settings, complete.
        topology: the ranks.
        output_dir: a folder on the disk to measure.
        rounds: saves of each kind.
        steps: steps before each save.

    Raises:
        ConfigError, DataError, TokenizerError, CheckpointError: of the recipe, its data or the disk.
    """
    with ExitStack() as stack:
        folder = ""
        if topology.is_main:
            output_dir.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=output_dir))
        lock = RunLock(Path(topology.broadcast_object(folder)) / "run")
        stack.callback(lock.release)
        topology.run_on_rank_0(lock.acquire)
        trainer = build_run(config, deepspeed_config, lock, topology, StopSignal())
        lines = _SaveBenchmark(trainer).run(rounds, steps)
    return lines if topology.is_main else []
