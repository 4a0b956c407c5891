"""Which part of each parameter a tensor-parallel rank holds, by the parameter's full name: the one place that says so.

In: full name, shape, number of ranks. Out: the rank's Shard. Not here: how the layers compute with it
(parallel/layers.py), which parameters a pipeline stage has (models/stages.py).

The cuts are Megatron-LM's (Shoeybi 2019): a rank has its heads' rows of query, key and value, its rows of the first
feed-forward matrix, the matching columns of the matrices after them, and a run of the vocabulary's rows. All else
(LayerNorm, position and token-type tables, heads, biases after a split sum) is whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.parallel.shards import Shard

Axis = Literal["qkv", "rows", "columns", "vocabulary"]
QKV_BLOCKS = 3
_AXES: tuple[tuple[re.Pattern[str], Axis], ...] = (
    (re.compile(r"(.*\.)?attention\.qkv\.(weight|bias)"), "qkv"),
    (re.compile(r"(.*\.)?mlp\.up\.(weight|bias)"), "rows"),
    (re.compile(r"(.*\.)?(attention\.output|mlp\.down)\.weight"), "columns"),
    (re.compile(r"word_embeddings\.weight|mlm_bias\.bias"), "vocabulary"),
)


def split_axis(name: str) -> Axis | None:
    """How tensor-parallel ranks share a parameter: rows of each of query, key and value, rows, columns, or rows of the
    vocabulary; None where each holds all of it.
    """
    return next((axis for pattern, axis in _AXES if pattern.fullmatch(name)), None)


def is_split(name: str) -> bool:
    """Whether tensor-parallel ranks hold different parts of a parameter; otherwise each holds all of it."""
    return split_axis(name) is not None


def vocabulary_rows_per_rank(vocab_size: int, size: int, vocab_multiple: int = 1) -> int:
    """Rows of a rank's part of the word embeddings, the rows of padding at the end of the last ranks' included.

    Args:
        vocab_size: words of the tokenizer.
        size: tensor-parallel ranks.
        vocab_multiple: each rank's rows are a multiple of this.
    """
    return -(-vocab_size // (size * vocab_multiple)) * vocab_multiple


def shard_of(name: str, shape: Sequence[int], size: int, rank: int, vocab_multiple: int = 1) -> Shard:
    """What tensor-parallel rank `rank` of `size` holds of a parameter; padding rows are in no shard.

    Args:
        name: full name of the parameter.
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
    axis = split_axis(name)
    if size == 1 or axis is None:
        return whole
    if axis == "vocabulary":
        height = vocabulary_rows_per_rank(num_rows, size, vocab_multiple)
        return Shard(whole.shape, ((min(rank * height, num_rows), min((rank + 1) * height, num_rows)),), whole.columns)
    if axis == "columns":
        width = _share(name, num_columns, size)
        return Shard(whole.shape, whole.rows, (rank * width, (rank + 1) * width))
    blocks = QKV_BLOCKS if axis == "qkv" else 1
    height = _share(name, num_rows, size * blocks)
    tops = [(block * size + rank) * height for block in range(blocks)]
    return Shard(whole.shape, tuple((top, top + height) for top in tops), whole.columns)


def _share(name: str, total: int, parts: int) -> int:
    if total % parts:
        raise ConfigError(
            f"{name}: {total} cannot be split into {parts} equal parts; choose parallel.tensor_parallel_size so that "
            "it divides the number of heads, the hidden size and the intermediate size"
        )
    return total // parts
