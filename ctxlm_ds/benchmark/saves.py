"""How long training stands still for a checkpoint: one that it waits for, and one written while it goes on.

In: a recipe with its data, run on one or several ranks. Out: seconds of a save, and seconds of a step without one and
beside one. Both kinds save the same states to the same disk, in turn.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctxlm_ds.checkpoint.manager import CheckpointManager
from ctxlm_ds.checkpoint.training import TrainingCheckpoints
from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.objectives.build import build_objective
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.run_builder import (
    agreed_data,
    build_engine,
    build_loaders,
    build_rows_by_node,
    initialize_weights,
    load_run_tokenizer,
    resolve,
)
from ctxlm_ds.training.engine import Engine
from ctxlm_ds.training.state import TrainState


@dataclass
class SaveFigures:
    """Seconds, a figure for each save or step that counts; those of the slowest rank."""

    bytes: int = 0
    waited_s: list[float] = field(default_factory=list)
    """Of a save that training waits for."""
    stood_still_s: list[float] = field(default_factory=list)
    """Of a save beside training: its beginning and its collective parts."""
    first_s: list[float] = field(default_factory=list)
    """The first of them, which takes the memory for the copies."""
    complete_after_s: list[float] = field(default_factory=list)
    """Until that one had its name."""
    plain_step_s: list[float] = field(default_factory=list)
    beside_step_s: list[float] = field(default_factory=list)
    """Of a step while one is being written."""

    def lines(self) -> list[str]:
        """A small table: median (smallest, largest)."""
        rows = (
            ("training waits", self.waited_s),
            ("beside training", self.stood_still_s),
            ("  the first", self.first_s),
            ("  complete after", self.complete_after_s),
            ("step", self.plain_step_s),
            ("step beside", self.beside_step_s),
        )
        table = [
            f"{name:<18}{statistics.median(v):>10.3f} s  ({min(v):.3f} to {max(v):.3f}, {len(v)} times)"
            for name, v in rows
            if v
        ]
        return [f"checkpoint        {self.bytes / 1e6:>10,.0f} MB", *table]


class SaveBenchmark:
    """Steps and saves of one engine.

    Args:
        config, deepspeed_config: of the run.
        topology: of its ranks.
        output_dir: on the disk to measure; what is written there is removed.
    """

    def __init__(
        self, config: RunConfig, deepspeed_config: dict[str, Any], topology: Topology, output_dir: Path
    ) -> None:
        self._topology = topology
        tokenizer = load_run_tokenizer(config)
        config = resolve(config, tokenizer)
        objective = build_objective(config.objective, tokenizer)
        rows = build_rows_by_node(config, tokenizer, objective, topology)
        data = agreed_data(rows.describe(config, tokenizer), topology)
        self._engine: Engine = build_engine(config, deepspeed_config, objective, topology)
        initialize_weights(config, self._engine)
        steps, _ = build_loaders(config, rows, objective, topology, 0)
        self._steps: Iterator[Step] = iter(steps)
        self._state = TrainState()
        self._learning_rate = config.optimizer.learning_rate
        run_dir = output_dir / "run"
        if topology.is_main:
            tokenizer.save(run_dir / "tokenizer")
        self._manager = CheckpointManager(run_dir, config.checkpoint, topology)
        self._checkpoints = TrainingCheckpoints(self._manager, self._engine, config, run_dir / "tokenizer", data)

    def run(self, rounds: int, num_steps: int) -> SaveFigures:
        """After one round that does not count (memory is taken in it), `rounds` of both kinds.

        Args:
            rounds: saves of each kind.
            num_steps: without a save, before each.
        """
        figures, first = SaveFigures(), SaveFigures()
        for number in range(rounds + 1):
            counted = figures if number else first
            counted.plain_step_s += [self._step() for _ in range(num_steps)]
            counted.waited_s.append(self._timed(lambda: self._checkpoints.save(self._state)))
            counted.plain_step_s += [self._step() for _ in range(num_steps)]
            self._save_beside(counted)
        figures.first_s = first.stood_still_s
        return figures

    def _save_beside(self, figures: SaveFigures) -> None:
        started_s = time.perf_counter()
        stood_still_s = self._timed(lambda: self._checkpoints.begin(self._state))
        while self._checkpoints.pending:
            figures.beside_step_s.append(self._step())
            if not self._topology.all_reduce_max([float(self._checkpoints.busy)])[0]:
                stood_still_s += self._timed(self._checkpoints.advance)
        figures.complete_after_s.append(time.perf_counter() - started_s)
        figures.stood_still_s.append(stood_still_s)
        newest = self._manager.last_good()
        figures.bytes = sum(path.stat().st_size for path in newest.rglob("*")) if newest is not None else 0

    def _step(self) -> float:
        return self._timed(self._train)

    def _train(self) -> None:
        self._engine.train_step(next(self._steps), self._state.step, self._learning_rate)
        self._state.step += 1

    def _timed(self, action: Any) -> float:
        """Seconds of the slowest rank."""
        self._topology.barrier()
        started_s = time.perf_counter()
        action()
        return self._topology.all_reduce_max([time.perf_counter() - started_s])[0]


def compare_saves(
    config: RunConfig, deepspeed_config: dict[str, Any], topology: Topology, output_dir: Path, rounds: int, steps: int
) -> list[str]:
    """The table on rank 0, nothing on the others.

    Raises:
        ConfigError, DataError, TokenizerError, CheckpointError: of the recipe, its data or the disk.
    """
    folder = None
    if topology.is_main:
        output_dir.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=output_dir)
    place = Path(topology.broadcast_object(folder.name if folder is not None else ""))
    try:
        figures = SaveBenchmark(config, deepspeed_config, topology, place).run(rounds, steps)
    finally:
        if folder is not None:
            folder.cleanup()
    return figures.lines() if topology.is_main else []
