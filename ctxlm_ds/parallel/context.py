"""A rank's share of every layer, its keys of dropout and samples, and its count of traffic; layers are passed them.

A key is a hash of (seed, step, global micro-batch, layer, place) and is passed to the dropout kernel as a tensor on the
device. A resume, a recomputed layer, another number of ranks or another cut into pipeline stages therefore drops the
same elements, and no generator state has to be saved. Only the dropout of attention probabilities inside torch's fused
operations draws from torch's generators. These are seeded from the host with the same key and the tensor-parallel rank,
which has its own heads.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ctxlm_ds.kernels.dropout import GAMMA, MIX_1, MIX_2
from ctxlm_ds.parallel.placement import vocabulary_rows_per_rank

PLACES = 8
"""Most places of a layer that drop something."""


class LayerKeys(NamedTuple):
    """The keys of one layer in one micro-batch."""

    places: Tensor
    """[PLACES] int64 on the device, of dropout."""
    words: np.ndarray
    """The same on the host."""
    rows: tuple[int, int]
    """64 bits from which the keys of the step's rows are made, and the micro-batch's number in the global batch."""


class DropoutStreams:
    """The keys of one rank's layers; `enabled` is True if the model draws anything."""

    def __init__(
        self, seed: int = 0, tensor_parallel_rank: int = 0, tensor_parallel_size: int = 1, enabled: bool = False
    ) -> None:
        self.seed = seed
        self.enabled = enabled
        self.num_layers = 0
        """Set by the module that runs the layers."""
        self.uses_generators = False
        """Set by a layer whose kernel takes no key."""
        self._rank = tensor_parallel_rank
        self._size = tensor_parallel_size
        self._keys: Tensor | None = None
        self._words: np.ndarray = np.zeros((1, PLACES), dtype=np.uint64)
        self._rows = 0, 0
        self._layer_keys: Tensor | None = None
        self._layer_words = self._words[0]
        self._layer_rows = 0, 0

    def begin(self, step: int, micro_batch: int, device: torch.device) -> None:
        """Make the keys of the next micro-batch, number `micro_batch` of the step."""
        if not self.enabled:
            return
        base = _digest(f"dropout:{self.seed}:{step}:{micro_batch}")
        self._words = _hashes(base, 1, self.num_layers * PLACES).reshape(self.num_layers, PLACES)
        self._keys = torch.from_numpy(self._words.view(np.int64)).to(device, non_blocking=True)
        self._rows = _digest(f"rows:{self.seed}:{step}"), micro_batch

    def layer(self, index: int) -> LayerKeys | None:
        """Return the keys of a layer (the same ones if it is recomputed), or None if nothing is drawn."""
        if self._keys is None:
            return None
        return LayerKeys(self._keys[index], self._words[index], self._rows)

    def use(self, keys: LayerKeys | None) -> None:
        """Set the keys of the layer that runs next."""
        if keys is None:
            return
        self._layer_keys, self._layer_words, self._layer_rows = keys
        if self.uses_generators:
            _seed_generators(int(self._layer_words[PLACES - 1]))

    def key(self, place: int, like: Tensor) -> Tensor:
        """Return the key of a place in the running layer, 0-d int64 on the device of `like`."""
        if self._layer_keys is None:
            return torch.zeros((), dtype=torch.int64, device=like.device)
        return self._layer_keys[place]

    def word(self, place: int) -> np.uint64:
        """Return the key of a place in the running layer on the host, for what a CPU draws."""
        return np.uint64(0) if self._layer_keys is None else np.uint64(self._layer_words[place])

    def row_keys(self, num_rows: int, like: Tensor) -> Tensor:
        """Return a key for each row of the running micro-batch, [num_rows] int64 on the device of `like`.

        They are hashes of (seed, step, number of the row in the global batch), so they do not depend on the layer or on
        the size of a micro-batch.
        """
        if self._layer_keys is None:
            return torch.zeros(num_rows, dtype=torch.int64, device=like.device)
        base, micro_batch = self._layer_rows
        words = _hashes(base, 1 + micro_batch * num_rows, num_rows)
        return torch.from_numpy(words.view(np.int64)).to(like.device, non_blocking=True)

    def seed_generators(self, place: int) -> None:
        """Seed torch's generators for a kernel that takes no key, differently on each tensor-parallel rank.

        A compiled layer without tensor parallelism keeps the layer's seed: seeding would cut its graph.
        """
        if self._layer_keys is None or (self._size == 1 and torch.compiler.is_compiling()):
            return
        _seed_generators(int(self._layer_words[place]) + self._rank)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _hashes(base: int, first: int, count: int) -> np.ndarray:
    """Return splitmix64's outputs number `first` to `first + count - 1` from the state `base`."""
    with np.errstate(over="ignore"):
        z = np.uint64(base) + np.arange(first, first + count, dtype=np.uint64) * np.uint64(GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    return z ^ (z >> np.uint64(31))


@torch._disable_dynamo
def _seed_generators(seed: int) -> None:
    seed &= (1 << 63) - 1
    # torch.manual_seed takes a millisecond more, for backends that are not there.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


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
