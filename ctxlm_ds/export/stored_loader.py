"""Loaders whose micro-batches have a teacher's stored outputs as further fields, read one micro-batch ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.loader import BatchPlan, EvalLoader, Step, TrainLoader
from ctxlm_ds.data.stream.run_datasets import RunRows
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.export.stored_outputs import (
    TOOL,
    changed_parts,
    changed_settings,
    deciding_parts,
    deciding_settings,
    open_outputs,
    refuse,
    with_tokenizer,
)
from ctxlm_ds.export.stored_rows import StoredRows
from ctxlm_ds.models.parts.stored_teacher import STORED
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.base import Tokenizer

AHEAD = 2
"""Micro-batches that are read or being read."""

Tensors = dict[str, torch.Tensor]


def open_rows(
    config: RunConfig, rows: RunRows, tokenizer: Tokenizer, fields: Sequence[str], last_row: int
) -> dict[str, StoredRows]:
    """Return the stored outputs of each part of a run; empty if the recipe names none.

    Args:
        config: the resolved recipe, with the teacher's fingerprint.
        rows: the datasets of the run.
        tokenizer: that of the run.
        fields: fields of the batch that the layers read.
        last_row: rows that the run reads in total.

    Raises:
        ConfigError: the folder is not complete, or belongs to another run.
        DataError: a file is missing or was cut off.
    """
    if config.teacher.outputs is None:
        return {}
    folder, outputs = Path(config.teacher.outputs), open_outputs(config)
    parts = deciding_parts(config, rows, last_row)
    refuse(folder, changed_settings(outputs, with_tokenizer(deciding_settings(config), tokenizer)))
    refuse(folder, changed_parts(outputs, parts))
    names = [name.removeprefix(STORED) for name in fields if name.startswith(STORED)]
    missing = [name for name in names if name not in outputs.tensors]
    if missing:
        raise ConfigError(
            f"teacher.outputs: {folder} has no {', '.join(missing)}, which objective {config.objective.name} needs "
            f"with these weights; set the weights as they were, or write the outputs again ({TOOL})"
        )
    found = {part.name: StoredRows(folder, outputs, part.name, names) for part in parts}
    for stored in found.values():
        stored.check_files()
    return found


class _ReadAhead:
    """The stored tensors of consecutive micro-batches; a thread reads the next while one is used.

    Micro-batches may outlive their loader's iteration, so the thread ends with the last reference to this object.
    """

    def __init__(self, rows: StoredRows, places: Iterator[NDArray[np.int64]]) -> None:
        self._rows, self._places = rows, places
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="teacher-outputs")
        self._futures: deque[Future[Tensors]] = deque()
        self._number, self._current = -1, Tensors()

    def take(self, number: int) -> Tensors:
        """Return the tensors of a micro-batch by its number, which never falls."""
        assert number >= self._number
        while self._number < number:
            self._begin()
            self._current = self._futures.popleft().result()
            self._number += 1
            self._begin()
        return self._current

    def _begin(self) -> None:
        while len(self._futures) < AHEAD and (places := next(self._places, None)) is not None:
            self._futures.append(self._pool.submit(self._read, places))

    def _read(self, places: NDArray[np.int64]) -> Tensors:
        return {STORED + name: self._rows.read(name, places) for name in self._rows.names}


class _Fields(dict[str, torch.Tensor]):
    """The fields of a micro-batch; the stored ones are read when they are asked for, and not kept."""

    def __init__(self, fields: dict[str, torch.Tensor], reader: _ReadAhead, number: int) -> None:
        super().__init__(fields)
        self._reader, self._number = reader, number

    def __missing__(self, name: str) -> torch.Tensor:
        return self._reader.take(self._number)[name]


class StoredTrainLoader(TrainLoader):
    """Training steps with the teacher's outputs for their rows."""

    def __init__(self, stored: StoredRows, *arguments: Any, **settings: Any) -> None:
        """Make the loader; further arguments are those of TrainLoader."""
        super().__init__(*arguments, **settings)
        self._stored = stored

    def __iter__(self) -> Iterator[Step]:
        reader = _ReadAhead(self._stored, chain.from_iterable(map(_offsets, self._steps())))
        number = 0
        for step, (first_row, plan) in zip(super().__iter__(), self._steps(), strict=False):
            if first_row + plan.global_batch_size > self._stored.num_rows:
                raise DataError(
                    f"teacher.outputs holds {self._stored.num_rows:,} rows, and the run has read {first_row:,}: "
                    "rollbacks pass over rows; write more (--steps of ctxlm teacher)"
                )
            numbers = range(number, number + len(step.micro_batches))
            number = numbers.stop
            pairs = zip(step.micro_batches, numbers, strict=True)
            yield replace(step, micro_batches=[Batch(_Fields(batch.fields, reader, n)) for batch, n in pairs])

    def _steps(self) -> Iterator[tuple[int, BatchPlan]]:
        return self._plan.steps(self._start_row)


def _offsets(step: tuple[int, BatchPlan]) -> NDArray[np.int64]:
    """Return [micro_batches, micro_batch_size] rows of the run for a step of this rank."""
    first_row, plan = step
    return first_row + plan.offsets()


class StoredEvalLoader(EvalLoader):
    """Held-out micro-batches with the teacher's outputs for their rows."""

    def __init__(self, stored: StoredRows, *arguments: Any, **settings: Any) -> None:
        """Make the loader; further arguments are those of EvalLoader."""
        super().__init__(*arguments, **settings)
        self._stored = stored

    def __iter__(self) -> Iterator[Batch]:
        offsets, size = self._plan.offsets()[0], self._plan.global_batch_size
        reader = _ReadAhead(self._stored, (number * size + offsets for number in range(len(self))))
        for number, batch in enumerate(super().__iter__()):
            yield Batch(_Fields(batch.fields, reader, number))
