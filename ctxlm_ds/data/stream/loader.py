"""From rows to the micro-batches of a step: reading, corruption and collation, in worker processes.

The step of a run that has consumed r rows takes positions r .. r + G of the endless stream of rows (an epoch may end
inside it); G is the global batch, which depends on r if the recipe has a ramp. Micro-batch g of the step takes
g·m .. (g + 1)·m of these and belongs to data-parallel rank g mod dp. So a resume needs one number, and neither ranks
nor micro-batches nor workers change the rows of a step.

Workers are forked from the thread that first iterates (before or after CUDA is initialized: they use numpy and compiled
loops only, and torch runs one thread in them). They live as long as the loader, send micro-batches as small pickled
arrays (no shared memory that could fill up), leave signals to the training process and die with it.
"""

from __future__ import annotations

import atexit
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.index.record import HELD_OUT_SEED
from ctxlm_ds.data.numba_random import stream_key
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.blend import LaneOrder, PlannedRows, RowOrder, train_stream
from ctxlm_ds.data.stream.collate import collate_arrays, count_labels, split_fields, to_batches
from ctxlm_ds.errors import CtxlmError, DataError
from ctxlm_ds.process.launchers import die_with_launcher
from ctxlm_ds.recipe.schema import EvaluationConfig, TrainingConfig
from ctxlm_ds.recipe.sections import DataSection

if TYPE_CHECKING:
    import torch

    from ctxlm_ds.objectives.base import Objective

TRAIN_MASKS = "mask"
HELD_OUT_MASKS = "held_out_mask"
STATIC_MASKS = "static_mask"
SMALLEST_PREFETCH = 2
POSITIONS_AT_ONCE = 1 << 14
"""Small micro-batches of a step are made together, up to this number of positions."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The division of a step's rows into micro-batches of ranks."""

    global_batch_size: int
    micro_batch_size: int
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    size_at: Callable[[int], int] | None = None
    """Returns the global batch size of the step that begins at a row; without it, it is constant."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one rank in a step; recipe/layout.py requires that the ranks have equally many."""
        assert self.global_batch_size % (self.micro_batch_size * self.data_parallel_size) == 0
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    def offsets(self) -> NDArray[np.int64]:
        """Return [micro_batches, micro_batch_size] positions of this rank in a step, in the order of computation."""
        own = self.data_parallel_rank + self.data_parallel_size * np.arange(self.micro_batches, dtype=np.int64)
        return own[:, None] * self.micro_batch_size + np.arange(self.micro_batch_size, dtype=np.int64)

    def steps(self, row: int) -> Iterator[tuple[int, BatchPlan]]:
        """Yield the first row and the division of every step from `row`, endlessly."""
        while True:
            plan = self if self.size_at is None else replace(self, global_batch_size=self.size_at(row))
            yield row, plan
            row += plan.global_batch_size


@dataclass(slots=True)
class Step:
    """The input of one rank in an optimizer step."""

    micro_batches: list[Batch]
    counts: dict[str, int]
    """The divisor of each loss term's sum, counted in this rank's micro-batches; the step's is the sum over the
    data-parallel ranks."""
    num_tokens: int
    """Positions of this rank's micro-batches that are not padding."""
    rows_consumed: int
    """Rows that the step takes from the stream, over all ranks."""
    epoch: int
    """Epoch (from 0) of the step's first row."""


class BatchBuilder:
    """The work of a loader process: planned rows to a flat micro-batch.

    It is masked under (seed, sample, epoch, index), or with static masks under (seed, sample).
    """

    def __init__(self, rows: RowSource, objective: Objective, data: DataSection, seed: int, purpose: str) -> None:
        self.rows = rows
        self.objective = objective
        self.data = data
        self.fields = objective.fields(data)
        self._key = stream_key(seed, STATIC_MASKS if rows.is_static else purpose)

    def __call__(self, planned: PlannedRows) -> NDArray[np.int32]:
        """Return the micro-batch as one array (collate.collate_arrays)."""
        return collate_arrays(self.objective, self.fields, *self.examples(planned))

    def __getitem__(self, planned: PlannedRows) -> NDArray[np.int32] | CtxlmError:
        """Return the same for torch's DataLoader, or a user's error, whose message thus stays unchanged."""
        try:
            return self(planned)
        except CtxlmError as error:
            return error

    def examples(self, planned: PlannedRows) -> tuple[Any, NDArray[np.int64]]:
        """Return the examples of all rows, and [b + 1] where each row's begin."""
        samples, row_starts = self.rows.samples(planned.rows, planned.epochs)
        budgets = self.objective.budgets(samples.lengths, self.data)
        return self.objective.corrupt_batch(samples, self._key, budgets), row_starts


class TrainLoader:
    """An endless stream of steps from row `start_row` (the number of rows consumed so far).

    `ranks` is this data-parallel rank and their number. With `idle` the steps have no micro-batches, for a pipeline
    stage that reads no data. With a GPU `device` the fields are on it. Raises DataError if there are no rows, and while
    iterating if a worker process died.
    """

    def __init__(
        self, rows: RowSource, objective: Objective, data: DataSection, training: TrainingConfig,
        ranks: tuple[int, int] = (0, 1), start_row: int = 0, idle: bool = False, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        _require_rows(rows)
        self._builder = BatchBuilder(rows, objective, data, training.seed, TRAIN_MASKS)
        size_at = training.batch_size_at if training.batch_ramp else None
        self._plan = BatchPlan(training.global_batch_size, training.micro_batch_size, *ranks, size_at)
        self._stream = train_stream(rows, data, training)
        self._start_row = start_row
        self._num_workers = 0 if idle else data.num_workers
        self._at_once = max(1, POSITIONS_AT_ONCE // (training.micro_batch_size * data.seq_length))
        self._idle = idle
        self._device = device
        self._prefetch = max(SMALLEST_PREFETCH, data.prefetch_steps * self._pieces(self._plan))
        self._arrays: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Step]:
        """Yield steps from start_row; iterating again starts there again."""
        self.close()
        self._arrays = self._start()
        atexit.register(_close_at_exit, weakref.ref(self))
        for first_row, plan in self._plan.steps(self._start_row):
            if self._arrays is None:
                return
            arrays = [self._next_array() for _ in range(self._pieces(plan))]
            yield self._step(arrays, plan.global_batch_size, self._stream.epoch_of(first_row))

    def _pieces(self, plan: BatchPlan) -> int:
        return 0 if self._idle else -(-plan.micro_batches // self._at_once)

    def restart(self, start_row: int) -> TrainLoader:
        """Return this loader, whose next iteration begins at another row; the workers of the current one end."""
        self.close()
        self._start_row = start_row
        return self

    def close(self) -> None:
        """Stop the workers (also done at the interpreter's exit)."""
        arrays, self._arrays = self._arrays, None
        # Not left to the collector: a traceback may hold the iterator, and multiprocessing would wait forever at exit
        # for workers that ignore SIGTERM.
        shut_down = getattr(arrays, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def _start(self) -> Iterator[Any]:
        """Return an endless iterator of arrays, made by workers or in this process."""
        if not self._num_workers:
            return map(self._builder, self._planned())
        import torch
        from torch.utils.data import DataLoader

        # Compiles what the workers run, so that each finds it in its memory.
        self._builder(next(self._planned()))
        loader: DataLoader[Any] = DataLoader(
            self._builder,
            sampler=self._planned(),
            batch_size=None,
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch,
            collate_fn=lambda array: array,
            worker_init_fn=partial(_init_worker, os.getpid()),
            multiprocessing_context="fork",
            generator=torch.Generator(),  # starting the workers would otherwise draw from the run's dropout stream
        )
        return iter(loader)

    def _planned(self) -> Iterator[PlannedRows]:
        """Yield the rows of each piece of work: some micro-batches of a step, or all."""
        for first_row, plan in self._plan.steps(self._start_row):
            step = self._stream.at(first_row + plan.offsets())
            for first in range(0, len(step.rows), self._at_once):
                piece = slice(first, first + self._at_once)
                yield PlannedRows(step.rows[piece].ravel(), step.epochs[piece].ravel())

    def _next_array(self) -> NDArray[np.int32]:
        assert self._arrays is not None
        try:
            array = next(self._arrays)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            self.close()
            raise DataError(
                f"a loader worker process died ({str(error).splitlines()[0]}); usually the machine ran out of memory: "
                "set data.num_workers or data.prefetch_steps lower (data.num_workers 0 loads in the training process)"
            ) from error
        if isinstance(array, CtxlmError):
            self.close()
            raise array
        return array

    def _step(self, arrays: list[NDArray[np.int32]], num_rows: int, epoch: int) -> Step:
        fields, terms = self._builder.fields, self._builder.objective.terms
        counts = {term.name: 0 for term in terms}
        num_tokens = 0
        for array in arrays:
            values = split_fields(array, fields)
            num_tokens += int(np.count_nonzero(values["sequence_ids"]))
            for term in terms:
                counts[term.name] += count_labels(term, values)
        size = self._plan.micro_batch_size
        batches = [batch for array in arrays for batch in to_batches(array, fields, size, self._device)]
        return Step(batches, counts, num_tokens, num_rows, epoch)


class EvalLoader:
    """The same micro-batches in every iteration: the first rows of a fixed order under fixed masks.

    A rank's share is at most a few thousand rows, which are ready in a fraction of a second without workers.
    """

    def __init__(
        self,
        rows: RowSource,
        objective: Objective,
        data: DataSection,
        training: TrainingConfig,
        evaluation: EvaluationConfig,
        ranks: tuple[int, int] = (0, 1),
        device: torch.device | None = None,
    ) -> None:
        _require_rows(rows)
        if evaluation.mask_prob is not None:
            objective = objective.for_evaluation(evaluation.mask_prob)
        self._builder = BatchBuilder(rows, objective, data, HELD_OUT_SEED, HELD_OUT_MASKS)
        micro = training.micro_batch_size
        self._device = device
        self._num_rows = min(evaluation.max_rows, len(rows))
        self._plan = BatchPlan(micro * ranks[1], micro, *ranks)
        self._order: RowOrder | LaneOrder = RowOrder(len(rows), HELD_OUT_SEED)
        if data.in_lanes:
            lanes = training.global_batch_size
            self._plan = BatchPlan(lanes, micro, *ranks)
            self._order = LaneOrder(-(-self._num_rows // lanes) * lanes, lanes)

    def __len__(self) -> int:
        """Return the number of micro-batches; all ranks have the same number."""
        return -(-self._num_rows // self._plan.global_batch_size) * self._plan.micro_batches

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's micro-batches; empty rows follow the last row, or in lanes that of the last lanes."""
        for first in range(0, self._num_rows, self._plan.global_batch_size):
            for offsets in self._plan.offsets():
                array = self._builder(self._planned(first + offsets))
                yield from to_batches(array, self._builder.fields, self._plan.micro_batch_size, self._device)

    def _planned(self, positions: NDArray[np.int64]) -> PlannedRows:
        if isinstance(self._order, LaneOrder):
            planned = self._order.at(positions)
            return PlannedRows(np.where(planned.rows < self._num_rows, planned.rows, -1), planned.epochs)
        planned = self._order.at(positions % self._order.num_rows)
        return PlannedRows(np.where(positions < self._num_rows, planned.rows, -1), planned.epochs)


def _close_at_exit(reference: weakref.ref[TrainLoader]) -> None:
    loader = reference()
    if loader is not None:
        loader.close()


def _init_worker(trainer: int, _: int) -> None:
    """Use one thread, ignore signals (srun sends them to every process), and die with the training process."""
    import torch

    torch.set_num_threads(1)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    die_with_launcher(watch_grandparent=False, parent=trainer)


def _require_rows(rows: RowSource) -> None:
    if len(rows) == 0:
        names = ", ".join(str(index.directory) for index in rows.indexes)
        raise DataError(f"no rows to load ({names or 'no dataset named'}); check data.train")
