"""Many tensor-parallel ranks in one process: torch's LocalTensorMode, whose tensors hold the values of every rank.

It runs what each rank would run, and the collectives between the values. The interface is torch's private one. A rank's
number is a torch.SymInt that stands for all numbers: what makes an int of it, a comparison, an index of a list or
megatron-core's layers, ends in an error.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ctxlm_ds.parallel.context import ParallelContext

PRIVATE = ("torch.distributed._local_tensor", "torch.testing._internal.distributed.fake_pg")


def missing() -> str | None:
    """The private module that this torch has not, or None."""
    return next((name for name in PRIVATE if importlib.util.find_spec(name) is None), None)


needs_local_tensors = pytest.mark.skipif(missing() is not None, reason=f"this torch has no {missing()}")


@dataclass(frozen=True)
class LocalRanks:
    """All ranks of one process."""

    size: int
    mode: Any
    rank: Any
    """The number of every rank at once."""

    def context(self, **settings: Any) -> ParallelContext:
        return ParallelContext(self.size, self.rank, dist.group.WORLD, **settings)

    def split(self, value: Tensor, dim: int = 0) -> Tensor:
        """Give each rank its part along a dimension."""
        parts = value.detach().chunk(self.size, dim)
        return self.each(lambda rank: parts[rank].clone()).requires_grad_(value.requires_grad)

    def whole(self, value: Tensor) -> Tensor:
        """Give every rank a copy."""
        copies = self.each(lambda rank: value.detach().clone())
        return copies.requires_grad_(value.requires_grad)

    def each(self, make: Callable[[int], Tensor]) -> Tensor:
        made: Tensor = self.mode.rank_map(make)
        return made


def values(held: Tensor) -> list[Tensor]:
    """The tensor of each rank."""
    local: Any = held.detach()
    return [local._local_tensors[rank] for rank in sorted(local._local_tensors)]


@contextmanager
def local_ranks(size: int) -> Iterator[LocalRanks]:
    """Make every operation one of `size` ranks."""
    from torch.distributed._local_tensor import LocalIntNode, LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        with LocalTensorMode(size) as mode:
            yield LocalRanks(size, mode, torch.SymInt(LocalIntNode({rank: rank for rank in range(size)})))
    finally:
        dist.destroy_process_group()


def assert_each(held: Tensor, expected: Sequence[Tensor], rtol: float = 1e-9, atol: float = 1e-9) -> None:
    """Every rank holds its expected values."""
    found = values(held)
    assert len(found) == len(expected)
    for rank, (value, right) in enumerate(zip(found, expected, strict=True)):
        close = torch.allclose(value.double(), right.double(), rtol, atol)
        assert close, f"rank {rank}: {value} instead of {right}"


def drawn(seed: int, *shape: int) -> Tensor:
    """A leaf of float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def of_leaf(leaf: Tensor) -> Tensor:
    """The gradient of a leaf that has one."""
    assert leaf.grad is not None
    return leaf.grad
