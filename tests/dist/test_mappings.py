"""Collectives on activations, forward and backward, against the same on whole tensors."""

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


def context(rank: int, sequence_parallel: bool = True) -> ParallelContext:
    group = build_topology(rank, RANKS, RANKS).tensor_group
    return ParallelContext(RANKS, rank, group, sequence_parallel)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def check_sums(rank: int, world_size: int) -> None:
    """Every rank has a summand; each uses the sum with other factors."""
    parallel = context(rank)
    summands, factors = [drawn(r, TOKENS, WIDTH) for r in range(RANKS)], drawn(9, TOKENS, WIDTH).detach()
    total = torch.stack(list(summands)).sum(0)
    own = slice(OWN * rank, OWN * (rank + 1))
    x = summands[rank].detach().clone().requires_grad_()
    found = mappings.reduce_from_ranks(x * 1, parallel)
    found.backward(factors)
    torch.testing.assert_close(found, total)
    torch.testing.assert_close(x.grad, factors)
    x = summands[rank].detach().clone().requires_grad_()
    found = mappings.reduce_scatter_tokens(x, parallel)
    found.backward(factors[own])
    torch.testing.assert_close(found, total[own])
    torch.testing.assert_close(x.grad, factors)
    whole = summands[0].detach()
    x = whole[own].clone().requires_grad_()
    found = mappings.gather_tokens(x, parallel)
    found.backward(factors)
    torch.testing.assert_close(found, whole)
    torch.testing.assert_close(x.grad, factors[own])
    torch.testing.assert_close(mappings.own_tokens(whole, parallel), whole[own])
    every = TOKENS * WIDTH * 4
    assert dict(parallel.traffic.num_bytes) == {"all_reduce": every, "reduce_scatter": every, "all_gather": 2 * every}
    alone = ParallelContext()
    assert mappings.reduce_from_ranks(x, alone) is x and mappings.share_parameters(alone, x) == (x,)


def check_shared_parameters(rank: int, world_size: int) -> None:
    """Gradients of parameters used for a rank's tokens add up in one collective."""
    parallel = context(rank)
    weight, bias, x = drawn(1, WIDTH), drawn(2, WIDTH), drawn(3, TOKENS, WIDTH).detach()
    expected = torch.autograd.grad((x * weight + bias).square().sum(), [weight, bias])
    shared = mappings.share_parameters(parallel, weight, bias)
    (mappings.own_tokens(x, parallel) * shared[0] + shared[1]).square().sum().backward()
    torch.testing.assert_close(weight.grad, expected[0])
    torch.testing.assert_close(bias.grad, expected[1])
    assert dict(parallel.traffic.calls) == {"all_reduce": 1}


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


@pytest.mark.parametrize("check", [check_sums, check_shared_parameters, check_product], ids=lambda check: check.__name__)
def test_mappings(check: object) -> None:
    run_ranks(check, RANKS)  # type: ignore[arg-type]
