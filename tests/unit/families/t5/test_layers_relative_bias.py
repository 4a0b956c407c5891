"""Buckets of distances and their biases against transformers' T5."""

from __future__ import annotations

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from ctxlm_ds.families.t5.layers import RelativeBias, distance_buckets
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.parameters import Normal


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (8, 12), (32, 20), (16, 1000)])
def test_buckets_are_those_of_transformers(causal: bool, buckets: int, reach: int) -> None:
    distances = torch.arange(-3000, 3001)
    wanted = T5Attention._relative_position_bucket(distances, not causal, buckets, reach)
    assert torch.equal(distance_buckets(distances, buckets, reach, causal), wanted)


@pytest.mark.parametrize("context_rank", [0, 1])
def test_distances_are_those_of_the_pairs(context_rank: int) -> None:
    """Also for a rank's heads inside attention; the gradients of the numbers are the same."""
    parallel = ParallelContext(context_size=2, context_rank=context_rank)
    shape = {"buckets": 8, "reach": 12, "causal": False}
    pairs, distances = (RelativeBias(4, Normal(1.0), parallel, square=square, **shape) for square in (True, False))
    torch.nn.init.normal_(pairs.weight)
    distances.weight.data.copy_(pairs.weight)
    ids, places = torch.zeros(2, 6, dtype=torch.int64), torch.arange(6)
    square, line = pairs(ids), distances(ids)
    assert square.shape == (2, 6, 6) and line.shape == (2, 11)
    assert torch.equal(line[:, places - places[:, None] + 5], square)
    assert torch.equal(square[:, 0, 1], pairs.weight[5].chunk(2)[context_rank])
    factors = torch.randn(2, 6, 6)
    (square * factors).sum().backward()
    (line[:, places - places[:, None] + 5] * factors).sum().backward()
    torch.testing.assert_close(distances.weight.grad, pairs.weight.grad)
