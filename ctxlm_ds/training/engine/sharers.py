"""Collectives of the ranks that share the parameters of a pipeline stage, for optimizers that need complete ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ctxlm_ds.parallel.topology import Topology


class Sharers:
    """The ranks of one pipeline stage: its tensor-parallel and data-parallel ranks."""

    def __init__(self, topology: Topology, zero_stage: int, device: torch.device) -> None:
        """Take the ranks; `device` is that of the training backend, which offloaded tensors are moved to."""
        self._topology = topology
        self._partitioned = zero_stage > 0
        self.device = device
        self.size = topology.tensor_parallel_size * topology.data_parallel_size
        self._first = topology.pipeline_parallel_rank * self.size
        self.rank = topology.rank - self._first

    def gather(self, value: Any) -> list[Any]:
        """Return the picklable `value` of each rank; all ranks of all stages call it."""
        return self._topology.all_gather_object(value)[self._first : self._first + self.size]

    def add_up(self, tensor: torch.Tensor) -> None:
        """Add up a tensor in place over the ranks that hold different parts of the parameters.

        Under ZeRO stage 0 these are the tensor-parallel ranks only.
        """
        group = self._topology.replica_group if self._partitioned else self._topology.tensor_group
        if (self.size if self._partitioned else self._topology.tensor_parallel_size) > 1:
            # Offloaded weights are in CPU memory, which nccl cannot reduce.
            moved = tensor.to(self.device)
            torch.distributed.all_reduce(moved, group=group)
            tensor.copy_(moved)

    def exchange(self, packed: torch.Tensor, sizes: list[int], lengths: list[int]) -> Sequence[torch.Tensor]:
        """Send a range of a tensor to each rank and return what each has sent; all ranks of the stage call it.

        Args:
            packed: 1-D, on `device`, of one data type on all ranks.
            sizes: elements for each rank, in the order of the ranks.
            lengths: elements that come from each rank.
        """
        received = packed.new_empty(sum(lengths))
        torch.distributed.all_to_all_single(received, packed, lengths, sizes, group=self._topology.replica_group)
        return received.split(lengths)
