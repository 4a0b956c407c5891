"""Word tables and dropout of 8 ranks in one process, values and gradients against one rank in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.layers import HiddenDropout, VocabParallelEmbedding
from ctxlm_ds.parallel.parameters import ZEROS
from tests.local_ranks import LocalRanks, assert_each, drawn, local_ranks, needs_local_tensors, of_leaf

pytestmark = [needs_local_tensors, pytest.mark.long]
SIZE, WIDTH, WORDS, TOKENS = 8, 12, 4, 3
"""Ranks; words and tokens of each."""
KERNELS = KernelSet({"dropout": "torch"}, "cpu", torch.float64)


class Table(VocabParallelEmbedding):
    """A table of all ranks: megatron-core's allocation takes a number for a rank."""

    def _allocate(self, vocab_size: int, hidden_size: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.zeros(self.num_rows, hidden_size))

    def spread(self, weight: torch.Tensor, ranks: LocalRanks, parallel: ParallelContext) -> None:
        self.weight = torch.nn.Parameter(ranks.split(weight.detach()))
        self.parallel, self.first_row = parallel, self.num_rows * ranks.rank


@pytest.mark.parametrize("splits_tokens", [False, True])
def test_look_up_and_decode(splits_tokens: bool) -> None:
    weight, factors = drawn(1, SIZE * WORDS, WIDTH), drawn(2, SIZE * TOKENS, WIDTH).detach()
    ids = torch.randint(SIZE * WORDS, (SIZE * TOKENS,), generator=torch.Generator().manual_seed(3))
    looked_up = F.embedding(ids, weight)
    scores = F.linear(looked_up, weight)
    (scores.square().sum() + (looked_up * factors).sum()).backward()
    with local_ranks(SIZE) as ranks:
        parallel = ranks.context(sequence_parallel=splits_tokens)
        tokens = ranks.split if splits_tokens else ranks.whole
        table = Table(SIZE * WORDS, WIDTH, ZEROS, KERNELS, ParallelContext(SIZE))
        table.spread(weight, ranks, parallel)
        found = table.look_up(ranks.whole(ids))
        own_scores = table.decode(found, splits_tokens)
        # The gradient of the scores is each rank's own, that of hidden states is every rank's.
        torch.autograd.backward([own_scores, found], [2.0 * own_scores.detach(), tokens(factors)])
    assert_each(found, list(looked_up.detach().chunk(SIZE)) if splits_tokens else [looked_up.detach()] * SIZE)
    assert_each(own_scores, list(scores.detach().chunk(SIZE, -1)))
    assert_each(of_leaf(table.weight), list(of_leaf(weight).chunk(SIZE)))


def test_dropout_of_split_tokens_is_that_of_one_rank() -> None:
    """A rank's first element is not the first of a word of four lanes."""
    x = drawn(1, SIZE * TOKENS, WIDTH + 1)
    whole = HiddenDropout(0.3, KERNELS, ParallelContext())(x, 0)
    whole.sum().backward()
    with local_ranks(SIZE) as ranks:
        own = ranks.split(x)
        found = HiddenDropout(0.3, KERNELS, ranks.context(sequence_parallel=True))(own, 0)
        found.sum().backward()
    assert 0.1 < float((whole == 0).double().mean()) < 0.5
    assert_each(found, list(whole.detach().chunk(SIZE)))
    assert_each(of_leaf(own), list(of_leaf(x).chunk(SIZE)))
