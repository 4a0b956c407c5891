"""From rows to the micro-batches of a step: reading, corruption and collation, in worker processes.

In: a RowSource, an objective (injected), a recipe, this rank's place. Out: Step by Step for training, Batch by Batch
for evaluation. What comes out depends on (seed, position in the stream) alone: not on workers, ranks or micro-batches.

Workers are forked from the thread that first iterates (before or after CUDA is up: they touch numpy only, and torch
runs one thread in them), live as long as the loader, send each micro-batch as one small pickled array (no shared
memory to run out of), leave signals to the training process and die with it.
"""

from __future__ import annotations

import atexit
import ctypes
import signal
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.config.schema import RunConfig
from ctxlm_ds.data.blend import train_stream
from ctxlm_ds.data.collate import (
    BatchShape,
    Objective,
    batch_shape,
    collate_arrays,
    prediction_budgets,
    split_fields,
    to_batch,
)
from ctxlm_ds.data.randomness import Key, KeyedStreams, SampleDraws
from ctxlm_ds.data.sample import IGNORE_LABEL, Batch, Example, Sample
from ctxlm_ds.data.sampler import BatchPlan, PlannedRows, RowOrder, TrainSampler, evaluation_rows
from ctxlm_ds.data.samples.index import RowSource
from ctxlm_ds.data.samples.record import HELD_OUT_SEED
from ctxlm_ds.errors import CtxlmError, DataError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

TRAIN_MASKS = "mask"
HELD_OUT_MASKS = "held_out_mask"
SMALLEST_PREFETCH = 2
PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Step:
    """What one rank computes in an optimizer step."""

    micro_batches: list[Batch]
    counts: dict[str, int]
    """Labels of each loss term in this rank's micro-batches (sum over the data-parallel ranks for the step's)."""
    num_tokens: int
    """Positions of this rank's micro-batches that are not padding."""
    rows_consumed: int
    """Rows that the step takes from the stream, over all ranks."""
    epoch: int
    """Epoch (from 0) of the step's first row."""


class BatchBuilder:
    """Planned rows to a flat micro-batch; runs in the workers.

    Each sample's masks are keyed by (seed, sample, epoch, index): `num_workers`, ranks and neighbours do not matter.
    """

    def __init__(self, rows: RowSource, objective: Objective, config: RunConfig, seed: int, purpose: str) -> None:
        self.rows = rows
        self.objective = objective
        self.config = config
        self.shape: BatchShape = batch_shape(config.data, config.objective, objective.terms, rows.pad_id)
        self._streams = KeyedStreams(seed, purpose)

    def __call__(self, planned: PlannedRows) -> NDArray[np.int32]:
        """The micro-batch as one array (collate.collate_arrays)."""
        return collate_arrays(self.examples(planned), self.shape)

    def examples(self, planned: PlannedRows) -> list[list[Example]]:
        """Each row's examples; samples of the whole micro-batch are corrupted together."""
        table: list[list[Example]] = []
        samples: list[Sample] = []
        keys: list[Key] = []
        open_rows: list[tuple[int, int]] = []
        for row, epoch in zip(planned.rows.tolist(), planned.epochs.tolist(), strict=True):
            table.append([])
            if row < 0:
                continue
            index, local_row = self.rows.locate(row)
            numbers = index.row_samples(local_row)
            if index.is_static:
                table[-1] = [index.example(number) for number in numbers]
                continue
            samples.extend(index.sample(number) for number in numbers)
            keys.extend((number, epoch, index.random_key) for number in numbers)
            open_rows.append((len(table) - 1, len(numbers)))
        corrupted = iter(self._corrupt(samples, keys))
        for place, count in open_rows:
            table[place] = [next(corrupted) for _ in range(count)]
        return table

    def _corrupt(self, samples: list[Sample], keys: list[Key]) -> list[Example]:
        if not samples:
            return []
        lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
        budgets = prediction_budgets(lengths, self.config.data, self.config.objective)
        return self.objective.corrupt_batch(samples, SampleDraws(self._streams, keys), budgets)


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
        self._prefetch = max(SMALLEST_PREFETCH, config.data.prefetch_steps * self._plan.micro_batches)
        self._arrays: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Step]:
        """Steps from start_row on; iterating again starts there again."""
        self.close()
        self._arrays = iter(self._data_loader())
        atexit.register(_close_at_exit, weakref.ref(self))
        step = 0
        while self._arrays is not None:
            micro_batches = [self._next_array() for _ in range(self._plan.micro_batches)]
            yield self._step(micro_batches, self._sampler.epoch_of_step(step))
            step += 1

    def close(self) -> None:
        """Stop the workers (done at the interpreter's exit as well)."""
        arrays, self._arrays = self._arrays, None
        # Not left to the collector: a traceback may hold the iterator, and workers that ignore SIGTERM would make
        # multiprocessing wait for them without end at exit.
        shut_down = getattr(arrays, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def _data_loader(self) -> DataLoader[Any]:
        import torch
        from torch.utils.data import DataLoader

        workers = self._num_workers
        return DataLoader(
            _WorkerSide(self._builder),
            sampler=self._sampler,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=self._prefetch if workers else None,
            collate_fn=_unchanged,
            worker_init_fn=_init_worker,
            multiprocessing_context="fork" if workers else None,
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
        shape, num_rows = self._builder.shape, self._plan.micro_batch_size
        counts = dict.fromkeys(shape.terms, 0)
        num_tokens = 0
        for array in arrays:
            fields = split_fields(array, num_rows, shape)
            num_tokens += int(np.count_nonzero(fields["sequence_ids"]))
            for term in shape.terms:
                counts[term] += int(np.count_nonzero(fields[f"labels.{term}"] != IGNORE_LABEL))
        batches = [to_batch(array, num_rows, shape) for array in arrays]
        return Step(batches, counts, num_tokens, self._plan.global_batch_size, epoch)


class EvalLoader:
    """The same micro-batches every time it is iterated: the first rows of a fixed order under fixed masks.

    A rank's share is at most a few thousand rows, which numpy prepares in a fraction of a second: no workers.

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

    def __iter__(self) -> Iterator[Batch]:
        for planned in evaluation_rows(self._order, self._max_rows, self._plan):
            yield to_batch(self._builder(planned), self._plan.micro_batch_size, self._builder.shape)


class _WorkerSide:
    """The builder as DataLoader's dataset; a user's error travels as a value, so that its message stays as it is."""

    def __init__(self, builder: BatchBuilder) -> None:
        self._builder = builder

    def __getitem__(self, planned: PlannedRows) -> NDArray[np.int32] | CtxlmError:
        try:
            return self._builder(planned)
        except CtxlmError as error:
            return error


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
