"""Which source each row of the endless training stream comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxlm_ds.config.schema import RunConfig
from ctxlm_ds.data.sampler import RowOrder

if TYPE_CHECKING:
    from ctxlm_ds.data.samples.index import RowSource


def train_stream(rows: RowSource, config: RunConfig) -> RowOrder:
    """The stream of a run over the rows of its sources."""
    return RowOrder(len(rows), config.training.seed)
