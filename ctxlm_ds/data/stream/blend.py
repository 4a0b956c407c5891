"""Which source each row of the endless training stream comes from.

In: the rows of the training sources, a recipe. Out: a stream: row and epoch of any position, computed on its own, so
that a resume needs one number. A blend decides in two steps: a SourceOrder (blend_orders.py) gives the position's
source and its number among all rows of that source; that number is epoch number // rows of the source, in which it is
place number % rows of a permutation keyed by (seed, source, epoch). So a source's rows all come once before any comes
again, whatever its share, and their masks change with the source's own epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.randomness import Permutation
from ctxlm_ds.data.stream.blend_orders import EpochOrder, MegatronOrder, SourceOrder, WeightedOrder, megatron_weights
from ctxlm_ds.data.stream.sampler import PlannedRows, RowOrder, RowStream
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.source_rules import source_names

if TYPE_CHECKING:
    from ctxlm_ds.data.index.index import RowSource

PURPOSE = "blend_rows"


class BlendedRows:
    """The stream in which a SourceOrder deals out sources.

    Args:
        order: the source of each position.
        counts: rows of each source in one of its epochs; source i's rows are numbered behind those of sources before.
        seed: of the order within each source's epochs.
        epoch_rows: positions in what is called an epoch of the whole stream.
    """

    def __init__(self, order: SourceOrder, counts: Sequence[int], seed: int, epoch_rows: int) -> None:
        self.order = order
        self.seed = seed
        self.epoch_rows = epoch_rows
        self._counts = np.array(counts, dtype=np.int64)
        self._starts = np.cumsum(self._counts) - self._counts

    def at(self, positions: NDArray[np.int64]) -> PlannedRows:
        """Rows, and the epoch of its own source in which each is read, at positions (any shape)."""
        sources, numbers = self.order.at(positions.ravel())
        epochs, within = np.divmod(numbers, self._counts[sources])
        # Places of the same epoch of the same source, one group after another.
        places = np.lexsort((epochs, sources))
        changes = np.flatnonzero(np.diff(sources[places]) | np.diff(epochs[places])) + 1
        rows = np.empty(len(within), dtype=np.int64)
        for group in filter(len, np.split(places, changes)):
            source, epoch = int(sources[group[0]]), int(epochs[group[0]])
            order = Permutation(int(self._counts[source]), self.seed, PURPOSE, source, epoch)
            rows[group] = self._starts[source] + order[within[group]]
        return PlannedRows(rows.reshape(positions.shape), epochs.reshape(positions.shape))

    def epoch_of(self, position: int) -> int:
        """Epoch of the whole stream that a position lies in."""
        return position // self.epoch_rows

    def shares(self) -> list[float]:
        """Share of each source in the rows of a long run."""
        return self.order.shares.tolist()


def train_stream(rows: RowSource, config: RunConfig) -> RowStream:
    """The stream of a run over the rows of data.train, one index for each.

    Raises:
        DataError: a source that must have a share has no row.
    """
    counts = [len(index) for index in rows.indexes]
    seed, blend = config.training.seed, config.data.blend
    epochs = [source.epochs or 1.0 for source in config.data.train]
    if blend == "concatenate" and all(number == 1.0 for number in epochs):
        return RowOrder(sum(counts), seed)
    _require_rows(counts, config)
    if blend == "concatenate":
        quotas = [max(1, round(number * count)) for number, count in zip(epochs, counts, strict=True)]
        return BlendedRows(EpochOrder(quotas, seed), counts, seed, sum(quotas))
    return BlendedRows(_order_by_weight(counts, config), counts, seed, sum(counts))


def stream_shares(rows: RowSource, config: RunConfig) -> list[float]:
    """Share of each of data.train in the rows of a long run."""
    stream = train_stream(rows, config)
    if isinstance(stream, BlendedRows):
        return stream.shares()
    return [len(index) / max(1, len(rows)) for index in rows.indexes]


def _order_by_weight(counts: Sequence[int], config: RunConfig) -> SourceOrder:
    data, seed = config.data, config.training.seed
    weights = [source.weight for source in data.train if source.weight is not None]
    if data.blend == "megatron":
        return MegatronOrder(megatron_weights(weights or None, counts))
    if data.blend == "temperature":
        weights = [count ** (1.0 / data.temperature) for count in counts]
    return WeightedOrder(weights, seed)


def _require_rows(counts: Sequence[int], config: RunConfig) -> None:
    empty = [name for name, count in zip(source_names(config), counts, strict=True) if count == 0]
    if empty:
        raise DataError(
            f"data.train: {', '.join(empty)} gives no row of this format and length, but data.blend "
            f"{config.data.blend} asks for some; leave it out of data.train, or change data.sample_format"
        )
