"""What a layer must know of tensor parallelism: handed to every layer, never looked up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ctxlm_ds.parallel.placement import vocabulary_rows_per_rank
from ctxlm_ds.parallel.random import DropoutStreams
from ctxlm_ds.parallel.traffic import TrafficCounter


@dataclass(frozen=True)
class ParallelContext:
    """One rank's part of every layer. The default is a whole model in one process."""

    size: int = 1
    """Ranks that share each layer."""
    rank: int = 0
    group: Any = None
    """Their process group; None where size is 1."""
    sequence_parallel: bool = False
    """Each rank holds a share of the tokens between the split matrices."""
    vocab_multiple: int = 1
    """Rows of a rank's part of the vocabulary are a multiple of this."""
    dropout: DropoutStreams = field(default_factory=DropoutStreams)
    traffic: TrafficCounter = field(default_factory=TrafficCounter)

    @property
    def splits_tokens(self) -> bool:
        """Whether activations between the split matrices are [b·s / size, h] instead of [b, s, h]."""
        return self.sequence_parallel and self.size > 1

    def vocabulary_rows(self, vocab_size: int) -> int:
        """Rows of this rank's part of the word embedding, zeros that pad the vocabulary included."""
        return vocabulary_rows_per_rank(vocab_size, self.size, self.vocab_multiple)
