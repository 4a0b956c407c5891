"""Rotary positions (Su 2021, arXiv:2104.09864): queries and keys rotate by angles that grow with their position.

The pairs that rotate are the elements i and i + d / 2 of a head, as in GPT-NeoX and transformers.
Shape letters: b rows, s positions, d size of a head; `...` any dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """The rotary positions of a layer. Angles are float32 in every precision, and no buffer that an engine rounds."""

    head_size: int
    base: float
    """Pair i turns by position / base^(2 i / d)."""
    num_positions: int
    """Positions are below this."""

    def angles(self, position_ids: Tensor) -> Tensor:
        """Map position_ids [b, s] to [b, s, d] float32, the d / 2 cosines and then the d / 2 sines."""
        if torch.compiler.is_compiling():
            return _angles(position_ids, self.base, self.head_size)
        return _table(self.base, self.head_size, self.num_positions, position_ids.device)[position_ids]

    def rotate(self, heads: Tensor, position_ids: Tensor) -> Tensor:
        """Rotate heads [b, s, ..., d] by position_ids [b, s]."""
        angles = self.angles(position_ids)
        between = (1,) * (heads.ndim - angles.ndim)
        cos, sin = angles.view(*position_ids.shape, *between, -1).chunk(2, dim=-1)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


def _angles(positions: Tensor, base: float, head_size: int) -> Tensor:
    """Map positions [...] to [..., d]."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions.device) / head_size
    turns = positions[..., None].float() * (1.0 / base**exponents)
    return torch.cat([turns.cos(), turns.sin()], dim=-1)


@lru_cache
def _table(base: float, head_size: int, length: int, device: torch.device) -> Tensor:
    """Return the angles of all positions, [length, d]; layers with the same base share it."""
    return _angles(torch.arange(length, device=device), base, head_size)
