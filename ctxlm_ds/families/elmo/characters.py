"""Vectors of words from their characters: a convolution over each word (Kim 2016), highway layers, a projection.

Shape letters: t words, c characters of a word, d width of a character, f filters, p projected width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctxlm_ds.families.elmo.config import CHARACTERS, ElmoSection
from ctxlm_ds.models.spec import ModelBuild
from ctxlm_ds.parallel.layers import replicated_linear
from ctxlm_ds.parallel.parameters import ZEROS, Constant, Normal, ParameterFacts, Uniform, declare

TABLE_LIMIT, FILTER_LIMIT = 1.0, 0.05
"""Bounds of the initial values."""
CARRY_BIAS = -2.0
"""Initial bias of the gate: a highway layer begins near the identity."""


class CharacterEncoder(nn.Module):
    """Words' vectors for the layers of both directions."""

    def __init__(self, model: ElmoSection, build: ModelBuild) -> None:
        super().__init__()
        width = sum(number for _, number in model.filters)
        self.max_characters = model.max_characters
        self.table = CharacterTable(model.character_size)
        self.filters = nn.ModuleList(Filter(model.character_size, *settings) for settings in model.filters)
        self.highways = nn.ModuleList(Highway(width, build) for _ in range(model.num_highways))
        self.projection = replicated_linear(width, model.projection_size, Normal(width**-0.5), build.kernels)

    def forward(self, ids: Tensor, reversed_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Map the characters of both streams [b, s * c] or [b, s, c] to vectors [b, s, p] of both."""
        words = torch.cat([ids.flatten(), reversed_ids.flatten()]).view(-1, self.max_characters)
        characters = self.table(words).transpose(1, 2)
        vectors = torch.cat([largest_of(characters) for largest_of in self.filters], dim=-1)
        for highway in self.highways:
            vectors = highway(vectors)
        both = self.projection(vectors).view(2, len(ids), -1, self.projection.out_features)
        return both[0], both[1]


class CharacterTable(nn.Module):
    """A vector for each character, which ids number from 1; id 0, no character, has the vector 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(CHARACTERS, width))
        declare(self, weight=ParameterFacts(Uniform(TABLE_LIMIT), decays=True))

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [t, c] to [t, c, d]."""
        return F.embedding(ids, F.pad(self.weight, (0, 0, 1, 0)))


class Filter(nn.Module):
    """Filters of one width, of which each gives its largest value in a word, at least 0."""

    def __init__(self, inputs: int, width: int, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(number, inputs, width))
        self.bias = nn.Parameter(torch.empty(number))
        declare(self, weight=ParameterFacts(Uniform(FILTER_LIMIT), decays=True))
        declare(self, bias=ParameterFacts(ZEROS, decays=False))

    def forward(self, characters: Tensor) -> Tensor:
        """Map characters [t, d, c] to [t, f]."""
        # The bias is the same at every place, so it can be added to the largest value only.
        largest, _ = F.conv1d(characters, self.weight).max(dim=-1)
        return F.relu(largest + self.bias)


class Highway(nn.Module):
    """Mixes its input with a ReLU layer of it by a gate (Srivastava 2015)."""

    def __init__(self, width: int, build: ModelBuild) -> None:
        super().__init__()
        init = Normal(width**-0.5)
        self.carry = replicated_linear(width, width, init, build.kernels)
        self.transform = replicated_linear(width, width, init, build.kernels)
        declare(self.carry, bias=ParameterFacts(Constant(CARRY_BIAS), decays=False))

    def forward(self, x: Tensor) -> Tensor:
        """Map x [t, f] to [t, f]."""
        return torch.lerp(x, F.relu(self.transform(x)), self.carry(x).sigmoid())
