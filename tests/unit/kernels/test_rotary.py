"""Rotation of packed heads against complex numbers, and the sizes that do not rotate."""

from __future__ import annotations

import pytest
import torch

from ctxlm_ds.kernels.rotary import Angles, torch_rotary

SIZES, SIZE = (4, 2, 2), 12
ROWS = torch.tensor([[0, 1, 2, 0, 1], [6, 5, 4, 3, 2]])
TURNS = torch.linspace(0, 3, 7)[:, None] * torch.tensor([1.0, 0.5, 0.25])


@pytest.mark.parametrize("partial", [False, True])
def test_pairs_turn_as_complex_numbers(partial: bool) -> None:
    turns = TURNS if partial else torch.cat([TURNS, TURNS / 8], dim=-1)
    half = turns.shape[-1]
    heads = torch.randn(2, 5, sum(SIZES), SIZE, generator=torch.Generator().manual_seed(0))
    table = torch.cat([turns.cos(), turns.sin()], dim=-1)
    query, key, value = torch_rotary(heads, SIZES, Angles(table, ROWS))
    assert [x.shape[2] for x in (query, key, value)] == list(SIZES) and torch.equal(value, heads[:, :, 6:])
    numbers = torch.complex(heads[:, :, :6, :half], heads[:, :, :6, half : 2 * half])
    turned = numbers * torch.polar(torch.ones(()), turns)[ROWS][:, :, None]
    expected = torch.cat([turned.real, turned.imag, heads[:, :, :6, 2 * half :]], dim=-1)
    torch.testing.assert_close(torch.cat([query, key], dim=2), expected)
    of_tokens = torch_rotary(heads, SIZES, Angles(table[ROWS]))
    assert all(torch.equal(one, other) for one, other in zip(of_tokens, (query, key, value), strict=True))
