"""The elements that a feed-forward layer drops do not depend on how ranks split its width."""

from __future__ import annotations

import pytest
import torch

from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.layers import HiddenDropout, InnerDropout
from tests.streams import streams_at

KERNELS = KernelSet({}, "cpu", torch.float32)


def drop(x: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    layer = InnerDropout(0.25, KERNELS, ParallelContext(size=size, rank=rank, dropout=streams_at(1)))
    dropped: torch.Tensor = layer.train()(x)
    return dropped


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_drop_their_share_of_the_elements(size: int) -> None:
    x = torch.rand(3, 5, 48) + 1.0
    whole = drop(x, 1, 0)
    shares = [drop(part.contiguous(), size, rank) for rank, part in enumerate(x.chunk(size, dim=-1))]
    assert torch.equal(torch.cat(shares, dim=-1), whole)
    assert 0.15 < float((whole == 0.0).float().mean()) < 0.35


def test_nothing_is_dropped_in_evaluation() -> None:
    x = torch.rand(2, 3, 8)
    assert torch.equal(InnerDropout(0.5, KERNELS, ParallelContext()).eval()(x), x)
    assert torch.equal(HiddenDropout(0.5, KERNELS, ParallelContext()).eval()(x, 0), x)
