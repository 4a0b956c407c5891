"""From rows to the micro-batches of a step: reading, corruption and collation, in worker processes.

In: a RowSource, an objective (injected), a recipe, this rank's place. Out: Step by Step for training, Batch by Batch
for evaluation. What comes out depends on (seed, position in the stream) alone: not on workers, ranks or micro-batches.

Workers are forked from the thread that first iterates (before or after CUDA is up: they touch numpy and compiled loops
only, and torch runs one thread in them), live as long as the loader, send micro-batches as small pickled arrays
(no shared memory to run out of), leave signals to the training process and die with it.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import signal
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.fields import Objective
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.index.record import HELD_OUT_SEED
from ctxlm_ds.data.numba_random import stream_key
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.blend import train_stream
from ctxlm_ds.data.stream.collate import collate_arrays, count_labels, split_fields, to_batches
from ctxlm_ds.data.stream.sampler import BatchPlan, PlannedRows, RowOrder, TrainSampler, evaluation_rows
from ctxlm_ds.errors import CtxlmError, DataError
from ctxlm_ds.recipe.schema import RunConfig

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

TRAIN_MASKS = "mask"
HELD_OUT_MASKS = "held_out_mask"
SMALLEST_PREFETCH = 2
POSITIONS_AT_ONCE = 1 << 14
"""Small micro-batches of a step are made together, up to so many positions."""
PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Step:
    """What one rank computes in an optimizer step."""

    micro_batches: list[Batch]
    counts: dict[str, int]
    """What each loss term's sum is divided by, counted in this rank's micro-batches (the step's is the sum over the
    data-parallel ranks)."""
    num_tokens: int
    """Positions of this rank's micro-batches that are not padding."""
    rows_consumed: int
    """Rows that the step takes from the stream, over all ranks."""
    epoch: int
    """Epoch (from 0) of the step's first row."""


class StepStream(Protocol):
    """Steps without end."""

    def __iter__(self) -> Iterator[Step]:
        """From the row that it was made for, or restarted at."""
        ...

    def restart(self, start_row: int) -> StepStream:
        """The same stream, whose next iteration begins at another row; the one before ends."""
        ...


class BatchBuilder:
    """Planned rows to a flat micro-batch; runs in the workers.

    Each sample's masks are keyed by (seed, sample, epoch, index): `num_workers`, ranks and neighbours do not matter.
    """

    def __init__(self, rows: RowSource, objective: Objective, config: RunConfig, seed: int, purpose: str) -> None:
        self.rows = rows
        self.objective = objective
        self.config = config
        self.fields = objective.fields(config.data)
        self._key = stream_key(seed, purpose)

    def __call__(self, planned: PlannedRows) -> NDArray[np.int32]:
        """Make the micro-batch as one array (collate.collate_arrays)."""
        return collate_arrays(self.objective, self.fields, *self.examples(planned))

    def examples(self, planned: PlannedRows) -> tuple[Any, NDArray[np.int64]]:
        """Make the examples of all rows, and [b + 1] where each row's begin."""
        if self.rows.is_static:
            return self.rows.examples(planned.rows)
        samples, row_starts = self.rows.samples(planned.rows, planned.epochs)
        budgets = self.objective.budgets(samples.lengths, self.config.data)
        return self.objective.corrupt_batch(samples, self._key, budgets), row_starts


class TrainLoader:
    """Steps without end, from row `start_row` of the stream (the rows consumed so far, any number).

    Raises:
        ConfigError: the global batch cannot be dealt out evenly.
        DataError: there are no rows, or a worker process died (while iterating).
    """

    def __init__(
        self,
        rows: RowSource,
        objective: Objective,
        config: RunConfig,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        start_row: int = 0,
    ) -> None:
        _require_rows(rows)
        training = config.training
        self._builder = BatchBuilder(rows, objective, config, training.seed, TRAIN_MASKS)
        self._plan = BatchPlan(
            training.global_batch_size, training.micro_batch_size, data_parallel_rank, data_parallel_size
        )
        self._sampler = TrainSampler(train_stream(rows, config), self._plan, start_row)
        self._num_workers = config.data.num_workers
        self._at_once = max(1, POSITIONS_AT_ONCE // (training.micro_batch_size * config.data.seq_length))
        self._pieces = -(-self._plan.micro_batches // self._at_once)
        self._prefetch = max(SMALLEST_PREFETCH, config.data.prefetch_steps * self._pieces)
        self._pin_memory = _uses_cuda()
        self._arrays: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Step]:
        """Steps from start_row on; iterating again starts there again."""
        self.close()
        self._arrays = self._start()
        atexit.register(_close_at_exit, weakref.ref(self))
        step = 0
        while self._arrays is not None:
            arrays = [self._next_array() for _ in range(self._pieces)]
            yield self._step(arrays, self._sampler.epoch_of_step(step))
            step += 1

    def restart(self, start_row: int) -> TrainLoader:
        """The same loader, whose next iteration begins at another row of the stream; the workers of this one end."""
        self.close()
        self._sampler.start_row = start_row
        return self

    def close(self) -> None:
        """Stop the workers (done at the interpreter's exit as well)."""
        arrays, self._arrays = self._arrays, None
        # Not left to the collector: a traceback may hold the iterator, and workers that ignore SIGTERM would make
        # multiprocessing wait for them without end at exit.
        shut_down = getattr(arrays, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def _start(self) -> Iterator[Any]:
        """Arrays without end, made by workers or here."""
        if not self._num_workers:
            return map(self._builder, self._planned())
        # Compiles what the workers run, so that each finds it in its memory.
        self._builder(next(self._planned()))
        return iter(self._data_loader())

    def _planned(self) -> Iterator[PlannedRows]:
        """The rows of each piece of work: some micro-batches of a step, or all."""
        micro_batches = iter(self._sampler)
        left = self._plan.micro_batches
        while True:
            piece = list(itertools.islice(micro_batches, min(left, self._at_once)))
            left = left - len(piece) or self._plan.micro_batches
            yield PlannedRows(
                np.concatenate([planned.rows for planned in piece]),
                np.concatenate([planned.epochs for planned in piece]),
            )

    def _data_loader(self) -> DataLoader[Any]:
        import torch
        from torch.utils.data import DataLoader

        return DataLoader(
            _WorkerSide(self._builder),
            sampler=self._planned(),
            batch_size=None,
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch,
            collate_fn=_unchanged,
            worker_init_fn=_init_worker,
            multiprocessing_context="fork",
            generator=torch.Generator(),  # its own, or starting the workers would draw from the run's dropout stream
        )

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

    def _step(self, arrays: list[NDArray[np.int32]], epoch: int) -> Step:
        fields, terms = self._builder.fields, self._builder.objective.terms
        counts = {term.name: 0 for term in terms}
        num_tokens = 0
        for array in arrays:
            values = split_fields(array, fields)
            num_tokens += int(np.count_nonzero(values["sequence_ids"]))
            for term in terms:
                counts[term.name] += count_labels(term, values)
        size = self._plan.micro_batch_size
        batches = [batch for array in arrays for batch in to_batches(array, fields, size, self._pin_memory)]
        return Step(batches, counts, num_tokens, self._plan.global_batch_size, epoch)


class EvalLoader:
    """The same micro-batches every time it is iterated: the first rows of a fixed order under fixed masks.

    A rank's share is at most a few thousand rows, which are ready in a fraction of a second: no workers.

    Raises:
        DataError: there are no rows.
    """

    def __init__(
        self,
        rows: RowSource,
        objective: Objective,
        config: RunConfig,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
    ) -> None:
        _require_rows(rows)
        size = config.training.micro_batch_size
        self._builder = BatchBuilder(rows, objective, config, HELD_OUT_SEED, HELD_OUT_MASKS)
        self._plan = BatchPlan(size * data_parallel_size, size, data_parallel_rank, data_parallel_size)
        self._order = RowOrder(len(rows), HELD_OUT_SEED)
        self._max_rows = config.evaluation.max_rows
        self._pin_memory = _uses_cuda()

    def __iter__(self) -> Iterator[Batch]:
        for planned in evaluation_rows(self._order, self._max_rows, self._plan):
            array = self._builder(planned)
            yield from to_batches(array, self._builder.fields, self._plan.micro_batch_size, self._pin_memory)


class _WorkerSide:
    """The builder as DataLoader's dataset; a user's error travels as a value, so that its message stays as it is."""

    def __init__(self, builder: BatchBuilder) -> None:
        self._builder = builder

    def __getitem__(self, planned: PlannedRows) -> NDArray[np.int32] | CtxlmError:
        try:
            return self._builder(planned)
        except CtxlmError as error:
            return error


def _uses_cuda() -> bool:
    """Whether micro-batches go to a GPU: they are then put into page-locked memory, from which copies overlap."""
    import torch

    return torch.cuda.is_available()


def _close_at_exit(reference: weakref.ref[TrainLoader]) -> None:
    loader = reference()
    if loader is not None:
        loader.close()


def _unchanged(array: Any) -> Any:
    return array


def _init_worker(_: int) -> None:
    """One thread; signals are the training process's affair (srun sends them to every process); die with the parent."""
    import torch

    torch.set_num_threads(1)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _require_rows(rows: RowSource) -> None:
    if len(rows) == 0:
        names: Iterable[str] = (str(index.directory) for index in rows.indexes)
        raise DataError(f"no rows to load ({', '.join(names) or 'no dataset named'}); check data.train")
