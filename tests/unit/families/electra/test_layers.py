"""Words drawn from logits: their distribution, and what the draw depends on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ctxlm_ds.families.electra.layers import draw_words
from ctxlm_ds.kernels.dropout import in_pieces
from ctxlm_ds.parallel.context import ParallelContext
from tests.streams import streams_at

ROWS, SLOTS, WORDS, LENGTH = 512, 40, 7, 64


def draw(logits: Tensor, positions: Tensor, step: int = 0, micro_batch: int = 0, seed: int = 3) -> Tensor:
    return draw_words(logits, positions, in_pieces, ParallelContext(dropout=streams_at(seed, step, micro_batch)))


def positions_of(rows: int = ROWS) -> Tensor:
    """Different positions in every row."""
    generator = torch.Generator().manual_seed(1)
    return torch.rand(rows, LENGTH, generator=generator).argsort(dim=1)[:, :SLOTS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_words_have_the_probabilities_of_the_softmax(dtype: torch.dtype) -> None:
    logits = torch.tensor([0.0, 1.0, -2.0, 3.0, 0.5, -0.5, 2.0]).to(dtype)
    drawn = draw(logits.expand(ROWS, SLOTS, WORDS), positions_of())
    count = drawn.numel()
    shares = drawn.flatten().bincount(minlength=WORDS) / count
    for share, wanted in zip(shares.tolist(), logits.double().softmax(0).tolist(), strict=True):
        assert abs(share - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / count)


def test_draws_of_two_slots_are_independent() -> None:
    drawn = draw(torch.zeros(ROWS, SLOTS, WORDS), positions_of())
    for other in (drawn.roll(1, dims=0), drawn.roll(1, dims=1)):
        equal, count = (drawn == other).float().mean(), drawn.numel()
        assert abs(equal - 1 / WORDS) < 4 * math.sqrt((WORDS - 1) / WORDS**2 / count)


def test_a_draw_depends_on_seed_step_row_and_position_only() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, positions = torch.randn(8, SLOTS, WORDS, generator=generator), positions_of(8)
    drawn = draw(logits, positions)
    assert torch.equal(draw(logits, positions), drawn)
    halves = [draw(logits[4 * part :][:4], positions[4 * part :][:4], micro_batch=part) for part in range(2)]
    assert torch.equal(torch.cat(halves), drawn)
    order = torch.randperm(SLOTS, generator=generator)
    assert torch.equal(draw(logits[:, order], positions[:, order]), drawn[:, order])
    for other in ({"step": 1}, {"step": -1}, {"seed": 4}, {"micro_batch": 1}):
        assert not torch.equal(draw(logits, positions, **other), drawn)


def test_a_word_of_padding_is_never_drawn_and_no_gradient_flows() -> None:
    logits = torch.zeros(ROWS, SLOTS, WORDS, requires_grad=True)
    masked = logits.masked_fill(torch.arange(WORDS) >= 5, float("-inf"))
    drawn = draw(masked, positions_of())
    assert int(drawn.max()) == 4 and not drawn.requires_grad
