"""Keys of dropout: one for each place of each layer, so that no generator state has to be kept anywhere.

A key is hashed from (seed, step, global micro-batch, layer, place) and handed to the dropout kernel as a tensor on the
device. A resume, a recomputed layer, another number of ranks of any kind or another cut into pipeline stages therefore
drops the same elements. Only the dropout of attention probabilities inside torch's fused operations draws from torch's
generators, which are seeded from the host with the same key; there each tensor-parallel rank has heads of its own and
its rank joins the key.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

PLACES = 8
"""Most places of a layer that drop something."""
GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class DropoutStreams:
    """Gives the layers of one rank their keys."""

    def __init__(
        self, seed: int = 0, tensor_parallel_rank: int = 0, tensor_parallel_size: int = 1, enabled: bool = False
    ) -> None:
        """`enabled` if the model drops anything."""
        self.seed = seed
        self.enabled = enabled
        self.num_layers = 0
        """Set by the module that runs the layers."""
        self.uses_generators = False
        """Set by a layer whose kernel takes no key."""
        self._rank = tensor_parallel_rank
        self._size = tensor_parallel_size
        self._keys: Tensor | None = None
        self._layer_keys: Tensor | None = None
        self._words: np.ndarray = np.zeros((1, PLACES), dtype=np.uint64)
        self._layer_words: np.ndarray = self._words[0]

    def begin(self, step: int, micro_batch: int, device: torch.device) -> None:
        """Make the keys of the micro-batch whose forward pass runs next; `micro_batch` is its number in the step."""
        if not self.enabled:
            return
        digest = hashlib.blake2b(f"dropout:{self.seed}:{step}:{micro_batch}".encode(), digest_size=8).digest()
        base = np.uint64(int.from_bytes(digest, "little"))
        with np.errstate(over="ignore"):
            places = np.arange(1, self.num_layers * PLACES + 1, dtype=np.uint64)
            self._words = _mix(base + places * GAMMA).reshape(self.num_layers, PLACES)
        self._keys = torch.from_numpy(self._words.view(np.int64)).to(device, non_blocking=True)

    def layer(self, index: int) -> tuple[Tensor, np.ndarray] | None:
        """Return the keys of a layer, to be used again when it is recomputed; None if nothing is dropped."""
        return None if self._keys is None else (self._keys[index], self._words[index])

    def use(self, keys: tuple[Tensor, np.ndarray] | None) -> None:
        """Let the layer that runs next take these keys."""
        if keys is None:
            return
        self._layer_keys, self._layer_words = keys
        if self.uses_generators:
            _seed_generators(int(self._layer_words[PLACES - 1]))

    def key(self, place: int, like: Tensor) -> Tensor:
        """Return the key of a place in the layer that runs, 0-d int64 on the device of `like`."""
        if self._layer_keys is None:
            return torch.zeros((), dtype=torch.int64, device=like.device)
        return self._layer_keys[place]

    def seed_generators(self, place: int) -> None:
        """Seed torch's generators for a kernel that takes no key, with each rank's own seed.

        A compiled layer that one rank holds whole keeps the layer's seed instead: seeding would cut its graph.
        """
        if self._layer_keys is None or (self._size == 1 and torch.compiler.is_compiling()):
            return
        _seed_generators(int(self._layer_words[place]) + self._rank)


def _mix(z: np.ndarray) -> np.ndarray:
    """Hash with splitmix64's finaliser."""
    z = (z ^ (z >> np.uint64(30))) * MIX_1
    z = (z ^ (z >> np.uint64(27))) * MIX_2
    return z ^ (z >> np.uint64(31))


@torch.compiler.disable
def _seed_generators(seed: int) -> None:
    seed &= (1 << 63) - 1
    # Not torch.manual_seed: it also walks through backends that are absent, a millisecond each time.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
