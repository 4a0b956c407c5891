"""The product of a layer that is split by its outputs, forward and backward, against the same on whole tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ctxlm_ds.parallel.megatron  # noqa: F401 (imported before the ranks are forked: it takes seconds)
from ctxlm_ds.parallel import mappings
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.topology import build_topology
from tests.dist.runner import run_ranks

pytestmark = pytest.mark.dist
RANKS, TOKENS, WIDTH, OUTPUTS = 2, 6, 4, 3
OWN = TOKENS // RANKS


def context(rank: int, sequence_parallel: bool) -> ParallelContext:
    group = build_topology(rank, RANKS, RANKS).tensor_group
    return ParallelContext(RANKS, rank, group, sequence_parallel)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def check_product(rank: int, world_size: int) -> None:
    """A layer split by its outputs: this rank's rows of the weight, the complete input or its tokens."""
    x, weight, bias = drawn(4, TOKENS, WIDTH), drawn(5, RANKS * OUTPUTS, WIDTH), drawn(6, RANKS * OUTPUTS)
    factors = drawn(7, TOKENS, RANKS * OUTPUTS).detach()
    F.linear(x, weight, bias).backward(factors)
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    rows, tokens = slice(OUTPUTS * rank, OUTPUTS * (rank + 1)), slice(OWN * rank, OWN * (rank + 1))
    for split in (False, True):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
            parallel = context(rank, split)
            own = [value.detach().to(dtype).requires_grad_() for value in
                   (x[tokens] if split else x, weight[rows], bias[rows])]  # fmt: skip
            product = mappings.ColumnParallelProduct(parallel, dtype == torch.bfloat16, split)
            found = product(*own)
            found.backward(factors[:, rows].to(dtype))
            expected = F.linear(x, weight, bias)[:, rows]
            gradients = (x.grad[tokens] if split else x.grad, weight.grad[rows], bias.grad[rows])
            for value, right in zip((found, *(one.grad for one in own)), (expected, *gradients), strict=True):
                assert value is not None and value.dtype == dtype
                torch.testing.assert_close(value.float(), right, rtol=tolerance, atol=tolerance)
            calls = {"all_gather": 2, "reduce_scatter": 1} if split else {"all_reduce": 1}
            assert dict(parallel.traffic.calls) == calls


def test_a_split_product() -> None:
    run_ranks(check_product, RANKS)
