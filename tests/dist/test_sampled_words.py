"""Tensor-parallel ranks, which hold parts of the vocabulary, draw the words of one rank."""

from __future__ import annotations

import pytest
import torch

from ctxlm_ds.families.electra.layers import draw_words
from ctxlm_ds.kernels.dropout import in_pieces
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.placement import vocabulary_rows_per_rank
from ctxlm_ds.parallel.topology import build_topology
from tests.dist.runner import run_ranks
from tests.streams import streams_at

pytestmark = pytest.mark.dist
ROWS, SLOTS, WORDS = 16, 5, 301


def drawn_words(rank: int, size: int, multiple: int, certain: bool) -> torch.Tensor:
    """Words from this rank's part of logits, padded with -inf; `certain`: two words have an infinite logit."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, SLOTS, WORDS, generator=generator)
    if certain:
        logits[..., [7, WORDS - 3]] = float("inf")
    positions = torch.rand(ROWS, 40, generator=generator).argsort(dim=1)[:, :SLOTS]
    rows = vocabulary_rows_per_rank(WORDS, size, multiple)
    padded = torch.nn.functional.pad(logits, (0, size * rows - WORDS), value=float("-inf"))
    group = build_topology(tensor_parallel_size=size).tensor_group
    streams = streams_at(7, 4, 2, rank, size)
    parallel = ParallelContext(size, rank, group, vocab_multiple=multiple, dropout=streams)
    return draw_words(padded[..., rank * rows :][..., :rows], positions, in_pieces, parallel)


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize(("size", "multiple"), [(2, 1), (4, 1), (4, 128)])
def test_parts_of_the_vocabulary_draw_the_words_of_the_whole(size: int, multiple: int, certain: bool) -> None:
    (alone,) = run_ranks(drawn_words, 1, 1, certain)
    found = run_ranks(drawn_words, size, multiple, certain)
    assert all(torch.equal(words, alone) for words in found)
    assert (alone == 7).all() if certain else len(alone.unique()) > 20
