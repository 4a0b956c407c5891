"""Keys of dropout and of samples: one for each place of each layer or each row, so no generator state has to be saved.

A key is a hash of (seed, step, global micro-batch, layer, place) and is passed to the dropout kernel as a tensor on the
device. A resume, a recomputed layer, another number of ranks or another cut into pipeline stages therefore drops the
same elements. Only the dropout of attention probabilities inside torch's fused operations draws from torch's
generators. These are seeded from the host with the same key and the tensor-parallel rank, which has its own heads.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ctxlm_ds.kernels.dropout import GAMMA, MIX_1, MIX_2

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
