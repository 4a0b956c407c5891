"""Dropout streams: one a layer, keyed by what is dropped, so that no generator state has to be kept anywhere.

The key is (seed, step, global micro-batch, layer), so a resume, a recomputed layer, another number of data-parallel
ranks or another cut into pipeline stages draws the same masks. Where tensor-parallel ranks hold the same activations
they draw the same mask; where each holds a part of its own (heads of the attention, tokens under sequence parallelism)
the rank joins the key. Works alike on the CPU and on CUDA: the default generators of both are seeded.
"""

from __future__ import annotations

import hashlib

import torch

MicroBatch = tuple[int, int]
"""Step, and index of the micro-batch in the global batch."""


class DropoutStreams:
    """Sets torch's default generators before each layer draws."""

    def __init__(
        self,
        seed: int = 0,
        tensor_parallel_rank: int = 0,
        tensor_parallel_size: int = 1,
        enabled: bool = False,
    ) -> None:
        """`enabled` where the model drops anything; otherwise torch's generators are left alone."""
        self.seed = seed
        self.enabled = enabled
        self.micro_batch: MicroBatch = (0, 0)
        """The micro-batch whose forward pass runs; a recomputed layer names its own."""
        self._rank = tensor_parallel_rank
        self._size = tensor_parallel_size
        self._layer = ""

    def start_layer(self, micro_batch: MicroBatch, layer: int) -> None:
        """Begin the stream of a layer, whose regions then begin their own."""
        if self.enabled:
            self._layer = f"{self.seed}:{micro_batch[0]}:{micro_batch[1]}:{layer}"
            _seed_generators(self._layer)

    def start_region(self, name: str, split: bool) -> None:
        """Begin the stream of one region of the layer (`name`), with a mask of its own on every rank where `split`.

        A compiled layer that one rank holds whole goes on with the layer's stream instead: seeding would cut its graph.
        """
        if not self.enabled or (self._size == 1 and torch.compiler.is_compiling()):
            return
        own = split and self._size > 1
        _seed_generators(f"{self._layer}:{name}:{self._rank}" if own else f"{self._layer}:{name}")


@torch.compiler.disable
def _seed_generators(key: str) -> None:
    digest = hashlib.blake2b(f"dropout:{key}".encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    # Not torch.manual_seed: it also walks through backends that are not there, a millisecond each time.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
