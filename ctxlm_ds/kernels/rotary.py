"""Rotary positions (Su 2021, arXiv:2104.09864) of packed queries, keys and values: plain operations.

The pairs that rotate are the elements i and i + r / 2 of a head, as in GPT-NeoX and transformers.
Shape letters: b rows, s positions, n all heads, d size of a head, r <= d elements that rotate, p positions of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ctxlm_ds.kernels.implementation import Implementation


class Angles(NamedTuple):
    """The angles of tokens in float32: r / 2 cosines and then r / 2 sines."""

    table: Tensor
    """[p, r], or [b, s, r] of the tokens themselves."""
    rows: Tensor | None = None
    """[b, s], each token's row of the table."""


RotaryKernel = Callable[[Tensor, tuple[int, int, int], Angles], tuple[Tensor, ...]]
"""Heads [b, s, n, d], how many are queries, keys and values, angles -> the three, queries and keys rotated.

The result may take the memory of the heads, which the caller reads no more.
"""


def torch_rotary(heads: Tensor, sizes: tuple[int, int, int], angles: Angles) -> tuple[Tensor, ...]:
    """Rotate queries and keys by plain operations."""
    queries, keys, values = sizes
    turned, value = heads.split((queries + keys, values), dim=2)
    of_tokens = angles.table if angles.rows is None else angles.table[angles.rows]
    cos, sin = of_tokens.unsqueeze(2).chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second, rest = turned.split((half, half, heads.shape[-1] - 2 * half), dim=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin, rest]
    return (*torch.cat(rotated, dim=-1).to(heads.dtype).split((queries, keys), dim=2), value)


IMPLEMENTATIONS = (Implementation("torch", lambda need: torch_rotary),)
