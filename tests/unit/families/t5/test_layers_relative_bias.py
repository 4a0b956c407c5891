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


def test_the_bias_is_a_number_for_each_distance_and_head() -> None:
    layer = RelativeBias(3, Normal(1.0), ParallelContext(), buckets=8, reach=12, causal=False)
    torch.nn.init.normal_(layer.weight)
    bias = layer(torch.zeros(2, 6, dtype=torch.int64))
    assert bias.shape == (3, 6, 6)
    for query in range(6):
        for key in range(6):
            bucket = int(distance_buckets(torch.tensor(key - query), 8, 12, False))
            assert torch.equal(bias[:, query, key], layer.weight[bucket])
