"""The part of a parameter that a tensor-parallel rank holds, from the parameter's declared split. Imports no torch.

The splits are Megatron-LM's (Shoeybi 2019): a rank has its heads' rows of query, key and value, its rows of the first
feed-forward matrix, the matching columns of the matrices after them, and consecutive rows of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.parallel.shards import Shard


@dataclass(frozen=True)
class Split:
    """The division of a parameter among tensor-parallel ranks."""

    axis: Literal["rows", "columns", "vocabulary"]
    """`rows`: equal runs of rows (outputs); `columns`: of columns (inputs); `vocabulary`: rows, padded at the end."""
    blocks: tuple[int, ...] = ()
    """`rows`: rows of each block that is split separately (query, key and value); empty for one block of all rows."""


ROWS, COLUMNS, VOCABULARY = Split("rows"), Split("columns"), Split("vocabulary")


def vocabulary_rows_per_rank(vocab_size: int, size: int, vocab_multiple: int = 1) -> int:
    """Return the rows of each rank's part of the word embeddings, a multiple of `vocab_multiple` with padding."""
    return -(-vocab_size // (size * vocab_multiple)) * vocab_multiple


def shard_of(
    name: str, split: Split | None, shape: Sequence[int], size: int, rank: int, vocab_multiple: int = 1
) -> Shard:
    """Return the shard of a parameter on tensor-parallel rank `rank` of `size`; padding rows are in no shard.

    Args:
        name: full name of the parameter, for messages.
        split: how it is shared.
        shape: of the full parameter.
        size: tensor-parallel ranks.
        rank: 0..size-1.
        vocab_multiple: see vocabulary_rows_per_rank.

    Raises:
        ConfigError: a split size is not divisible by the number of ranks.
    """
    if not 0 <= rank < size or vocab_multiple < 1:
        raise ValueError(f"rank {rank} of {size}, multiple {vocab_multiple}")
    whole = Shard.whole(shape)
    num_rows, num_columns = whole.matrix_shape
    if size == 1 or split is None:
        return whole
    if split.axis == "vocabulary":
        height = vocabulary_rows_per_rank(num_rows, size, vocab_multiple)
        return Shard(whole.shape, ((min(rank * height, num_rows), min((rank + 1) * height, num_rows)),), whole.columns)
    if split.axis == "columns":
        width = _share(name, num_columns, size)
        return Shard(whole.shape, whole.rows, (rank * width, (rank + 1) * width))
    ranges, top = [], 0
    for block in split.blocks or (num_rows,):
        height = _share(name, block, size)
        ranges.append((top + rank * height, top + (rank + 1) * height))
        top += block
    if top != num_rows:
        raise ValueError(f"{name}: blocks {split.blocks} do not add up to {num_rows} rows")
    return Shard(whole.shape, tuple(ranges), whole.columns)


def _share(name: str, total: int, parts: int) -> int:
    if total % parts:
        raise ConfigError(
            f"{name}: {total} cannot be split into {parts} equal parts; choose parallel.tensor_parallel_size so that "
            "it divides the number of heads, the hidden size and the intermediate size"
        )
    return total // parts
