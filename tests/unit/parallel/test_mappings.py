"""The mappings on 8 and 64 ranks in one process, values and gradients against whole tensors in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ctxlm_ds.parallel import mappings
from tests.local_ranks import assert_each, drawn, local_ranks, needs_local_tensors, of_leaf

pytestmark = [needs_local_tensors, pytest.mark.long]
WIDTH, TOKENS, INNER = 8, 2, 3
"""Tokens and inner outputs of a rank."""
ELEMENT = 8


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("splits_tokens", [False, True])
def test_a_feed_forward_layer_is_that_of_one_rank(size: int, splits_tokens: bool) -> None:
    """Split by its outputs, then by its inputs, with a bias that every rank holds."""
    x, factors = drawn(1, size * TOKENS, WIDTH), drawn(2, size * TOKENS, WIDTH).detach()
    up, of_up, down, of_down = (
        drawn(3, size * INNER, WIDTH),
        drawn(4, size * INNER),
        drawn(5, WIDTH, size * INNER),
        drawn(6, WIDTH),
    )
    whole = F.linear(F.gelu(F.linear(x, up, of_up)), down, of_down)
    whole.backward(factors)
    with local_ranks(size) as ranks:
        parallel = ranks.context(sequence_parallel=splits_tokens)
        tokens = ranks.split if splits_tokens else ranks.whole
        own = [tokens(x), ranks.split(up), ranks.split(of_up), ranks.split(down, 1), ranks.whole(of_down)]
        inner = F.gelu(mappings.ColumnParallelProduct(parallel, False, splits_tokens)(*own[:3]))
        reduce = mappings.reduce_scatter_tokens if splits_tokens else mappings.reduce_from_ranks
        (bias,) = mappings.share_parameters(parallel, own[4])
        found = reduce(F.linear(inner, own[3]), parallel) + bias
        found.backward(tokens(factors))

    def of_tokens(value: torch.Tensor) -> list[torch.Tensor]:
        return list(value.chunk(size)) if splits_tokens else [value] * size

    assert_each(found, of_tokens(whole.detach()))
    expected = [
        of_tokens(of_leaf(x)),
        of_leaf(up).chunk(size),
        of_leaf(of_up).chunk(size),
        of_leaf(down).chunk(size, 1),
    ]
    for leaf, gradients in zip(own, [*expected, [of_leaf(of_down)] * size], strict=True):
        assert_each(of_leaf(leaf), list(gradients))
    state, bias_bytes = size * TOKENS * WIDTH * ELEMENT, WIDTH * ELEMENT
    sent = {"all_gather": 3 * state, "reduce_scatter": 2 * state, "all_reduce": bias_bytes}
    assert dict(parallel.traffic.num_bytes) == (sent if splits_tokens else {"all_reduce": 2 * state})


@pytest.mark.parametrize("size", [8, 64])
def test_gathered_tokens_return_each_rank_its_gradient(size: int) -> None:
    """Every rank computes the same with them."""
    x, factors = drawn(1, size * TOKENS, WIDTH), drawn(2, size * TOKENS, WIDTH).detach()
    with local_ranks(size) as ranks:
        parallel, own = ranks.context(sequence_parallel=True), ranks.split(x)
        gathered = mappings.gather_tokens(own, parallel)
        gathered.backward(ranks.whole(factors))
        again = mappings.own_tokens(gathered, parallel)
    assert_each(gathered, [x.detach()] * size)
    assert_each(again, list(x.detach().chunk(size)))
    assert_each(of_leaf(own), list(factors.chunk(size)))
