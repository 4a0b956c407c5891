"""Loaders for a rank that sees no data: a pipeline stage between the first and the last.

They keep step with the loaders of the other stages (the same number of steps, rows and batches) and read nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ctxlm_ds.data.fields import Term
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.stream.blend import train_stream
from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.data.stream.sampler import BatchPlan, RowOrder, TrainSampler, evaluation_rows
from ctxlm_ds.recipe.schema import RunConfig


class IdleTrainLoader:
    """TrainLoader's steps without their micro-batches."""

    def __init__(
        self, rows: RowSource, terms: Sequence[Term], config: RunConfig, data_parallel_size: int, start_row: int
    ) -> None:
        training = config.training
        plan = BatchPlan(training.global_batch_size, training.micro_batch_size, 0, data_parallel_size)
        self._sampler = TrainSampler(train_stream(rows, config), plan, start_row)
        self._terms = terms

    def restart(self, start_row: int) -> IdleTrainLoader:
        """The same loader, whose next iteration begins at another row of the stream."""
        self._sampler.start_row = start_row
        return self

    def __iter__(self) -> Iterator[Step]:
        """Steps without end."""
        step = 0
        while True:
            counts = {term.name: 0 for term in self._terms}
            yield Step([], counts, 0, self._sampler.plan.global_batch_size, self._sampler.epoch_of_step(step))
            step += 1


class IdleEvalLoader:
    """As many times None as EvalLoader has batches."""

    def __init__(self, rows: RowSource, config: RunConfig, data_parallel_size: int) -> None:
        size = config.training.micro_batch_size
        self._order = RowOrder(len(rows), 0)
        self._max_rows = config.evaluation.max_rows
        self._plan = BatchPlan(size * data_parallel_size, size, 0, data_parallel_size)

    def __iter__(self) -> Iterator[None]:
        return (None for _ in evaluation_rows(self._order, self._max_rows, self._plan))
