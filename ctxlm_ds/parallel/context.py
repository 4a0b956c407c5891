"""A rank's share of every layer, and its count of the layers' traffic. Both are passed to the layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ctxlm_ds.parallel.placement import vocabulary_rows_per_rank
from ctxlm_ds.parallel.random import DropoutStreams

if TYPE_CHECKING:
    from torch import Tensor

CONTEXT = "context."
"""Begins the operations of context parallelism in a TrafficCounter; the others are tensor parallelism's."""


class TrafficCounter:
    """Calls and bytes of one rank's collectives inside layers, which DeepSpeed's comms logger does not see.

    Bytes count as there: the tensor handed to the collective, that is the complete one of an all-reduce, the gathered
    one of an all-gather, and the input of a reduce-scatter or all-to-all.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    def add(self, operation: str, num_bytes: int) -> None:
        """Count one collective: all_reduce, all_gather, reduce_scatter or all_to_all, after CONTEXT if of that axis."""
        self.calls[operation] += 1
        self.num_bytes[operation] += num_bytes

    def reset(self) -> None:
        self.calls.clear()
        self.num_bytes.clear()


@dataclass(frozen=True)
class ParallelContext:
    """One rank's share of every layer. The default is a complete model in one process."""

    size: int = 1
    """Ranks that share each layer."""
    rank: int = 0
    group: Any = None
    """Their process group; None if size is 1."""
    sequence_parallel: bool = False
    """Each rank holds a share of the tokens between the split matrices."""
    vocab_multiple: int | None = 1
    """Rows of a rank's part of the vocabulary are a multiple of this (vocabulary_rows_per_rank)."""
    dropout: DropoutStreams = field(default_factory=DropoutStreams)
    traffic: TrafficCounter = field(default_factory=TrafficCounter)
    context_size: int = 1
    """Ranks that share the positions of each row (parallel/mappings.py)."""
    context_rank: int = 0
    context_group: Any = None
    """Their process group; None if context_size is 1."""
    rows: int = 1
    """Rows of a micro-batch."""

    @property
    def splits_tokens(self) -> bool:
        """True if activations between the split matrices are [b·s / size, h] instead of [b, s, h]."""
        return self.sequence_parallel and self.size > 1

    @property
    def head_share(self) -> int:
        """Number of this rank's share of the heads inside attention, of size x context_size shares."""
        return self.rank * self.context_size + self.context_rank

    def own_shape(self, ids: Tensor) -> tuple[int, int]:
        """Return the rows and this rank's positions of complete rows ids [b, s]."""
        return ids.shape[0], ids.shape[1] // self.context_size

    def vocabulary_rows(self, vocab_size: int) -> int:
        """Return the rows of this rank's part of the word embedding, including zeros that pad the vocabulary."""
        return vocabulary_rows_per_rank(vocab_size, self.size, self.vocab_multiple)
