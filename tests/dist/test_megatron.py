"""Split layers, the split table and its cross entropy on two ranks against the whole ones, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.cross_entropy import first_largest, label_losses, squared_totals
from ctxlm_ds.parallel.layers import VocabParallelEmbedding
from ctxlm_ds.parallel.mappings import own_tokens
from ctxlm_ds.parallel.parameters import Normal, collect_facts
from ctxlm_ds.parallel.placement import shard_of
from ctxlm_ds.parallel.topology import build_topology
from tests.dist.runner import run_ranks

pytestmark = pytest.mark.dist
RANKS, ROWS, LENGTH, WIDTH, INNER, VOCAB = 2, 2, 4, 6, 8, 7
KERNELS, INIT = KernelSet({}, "cpu", torch.float32), Normal(1.0)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def context(rank: int, sequence_parallel: bool) -> ParallelContext:
    group = build_topology(rank, RANKS, RANKS).tensor_group
    return ParallelContext(RANKS, rank, group, sequence_parallel, vocab_multiple=3)


def split_from(whole: nn.Module, own: nn.Module, parallel: ParallelContext) -> None:
    """Give a rank's layer its share of the whole one's values."""
    for name, facts in collect_facts(whole).items():
        value = whole.get_parameter(name).detach()
        shard = shard_of(name, facts.split, value.shape, parallel.size, parallel.rank, parallel.vocab_multiple)
        with torch.no_grad():
            own.get_parameter(name).view(-1)[: shard.num_elements].copy_(shard.extract(value))


def check_gradients(whole: nn.Module, own: nn.Module, parallel: ParallelContext) -> None:
    for name, facts in collect_facts(whole).items():
        gradient, mine = whole.get_parameter(name).grad, own.get_parameter(name).grad
        assert gradient is not None and mine is not None
        shard = shard_of(name, facts.split, gradient.shape, parallel.size, parallel.rank, parallel.vocab_multiple)
        torch.testing.assert_close(mine.view(-1)[: shard.num_elements], shard.extract(gradient), msg=name)


def check_table(rank: int, world_size: int, sequence_parallel: bool) -> None:
    """Words looked up, scores, and the loss of labels: 7 words on two ranks of 6 rows, so most of the second's pad."""
    parallel, whole = (
        context(rank, sequence_parallel),
        VocabParallelEmbedding(VOCAB, WIDTH, INIT, KERNELS, ParallelContext()),
    )
    whole.weight.data = drawn(1, VOCAB, WIDTH)
    own = VocabParallelEmbedding(VOCAB, WIDTH, INIT, KERNELS, parallel)
    split_from(whole, own, parallel)
    assert (own.num_rows, own.num_words) == (6, [6, 1][rank]) and not own.weight[own.num_words :].any()
    ids = torch.tensor([[0, 6, 5, 3], [2, 2, 6, 1]])
    labels = torch.tensor([[6, IGNORE_LABEL, 0, 5], [1, 6, 2, IGNORE_LABEL]])
    hidden = whole.look_up(ids)
    logits = whole.decode(hidden)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_LABEL, reduction="none")
    weights = drawn(3, labels.numel())
    squared = logits.flatten(0, 1).logsumexp(-1).square()[labels.flatten() != IGNORE_LABEL].sum()
    ((losses * weights).sum() + 0.1 * squared).backward()
    found = own.look_up(ids)
    torch.testing.assert_close(found, own_tokens(hidden.flatten(0, 1), parallel) if sequence_parallel else hidden)
    scores = own.decode(found, split_tokens=sequence_parallel)
    scores = scores if sequence_parallel else scores.flatten(0, 1)
    before = scores.detach().clone()
    own_losses, hits = label_losses(scores, labels, parallel)
    torch.testing.assert_close(own_losses, losses)
    assert torch.equal(scores.detach(), before), "other terms read the logits too"
    assert hits.tolist() == (logits.argmax(-1) == labels).flatten().float().tolist()
    own_squared = squared_totals([scores], [labels], parallel).loss
    torch.testing.assert_close(own_squared, squared)
    ((own_losses * weights).sum() + 0.1 * own_squared).backward()
    check_gradients(whole, own, parallel)
    assert own.weight.grad is not None and not own.weight.grad[own.num_words :].any()


def check_ties(rank: int, world_size: int, sequence_parallel: bool) -> None:
    """The first of equal logits is the same word, whichever ranks hold them."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [5.0, 5.0, 5.0, 5.0], [0.0, 1.0, 2.0, 9.0], [-1.0, 2.0, 0.0, 2.0]])
    own = logits[:, 2 * rank : 2 * rank + 2]
    assert first_largest(own, context(rank, sequence_parallel)).tolist() == [1, 0, 3, 1]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("check", [check_table, check_ties], ids=lambda check: check.__name__)
def test_split_layers(check: object, sequence_parallel: bool) -> None:
    run_ranks(check, RANKS, sequence_parallel)  # type: ignore[arg-type]
