"""Rotary positions (Su 2021, arXiv:2104.09864): queries and keys rotate by angles that grow with their position.

Shape letters: b rows, s positions, d size of a head; `...` any dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ctxlm_ds.kernels.rotary import Angles


@dataclass(frozen=True)
class LinearScaling:
    """Positions closer together by a factor (Chen 2023, arXiv:2306.15595)."""

    factor: float

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Map the turns per position [d / 2] to slower ones."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's positions (meta-llama/llama-models, apply_scaling).

    Pairs that turn less than `low` times in the original length turn slower by the factor, those that turn more than
    `high` times keep their speed, and those between have a mixture of both, linear in their turns.
    """

    factor: float
    low: float
    high: float
    original_length: int

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Map the turns per position [d / 2] to slower ones."""
        turns = self.original_length * frequencies / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return torch.lerp(frequencies / self.factor, frequencies, kept)


Scaling = LinearScaling | Llama3Scaling


@dataclass(frozen=True)
class Rotary:
    """The rotary positions of a layer. Angles are float32 in every precision, and no buffer that an engine rounds."""

    head_size: int
    base: float
    """Pair i turns by position / base^(2 i / d)."""
    num_positions: int
    """Positions are below this."""
    scaling: Scaling | None = None
    """Turns pairs slower, for rows longer than those of the first training."""

    def angles(self, position_ids: Tensor) -> Angles:
        """Return the angles of tokens at position_ids [b, s]."""
        if torch.compiler.is_compiling():
            return Angles(_angles(position_ids, self.base, self.head_size, self.scaling))
        table = _table(self.base, self.head_size, self.scaling, self.num_positions, position_ids.device)
        return Angles(table, position_ids)


def _angles(positions: Tensor, base: float, head_size: int, scaling: Scaling | None) -> Tensor:
    """Map positions [...] to [..., d]."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions.device) / head_size
    frequencies = 1.0 / base**exponents
    turns = positions[..., None].float() * (frequencies if scaling is None else scaling(frequencies))
    return torch.cat([turns.cos(), turns.sin()], dim=-1)


@lru_cache
def _table(base: float, head_size: int, scaling: Scaling | None, length: int, device: torch.device) -> Tensor:
    """Return the angles of all positions, [length, d]; layers with the same base and scaling share it."""
    return _angles(torch.arange(length, device=device), base, head_size, scaling)
