"""ELMo (Peters 2018; bilm-tf) as a list of layers: words' vectors, LSTM layers of two directions, the softmax.

Shape letters: b rows, s positions, p projected width, c cells.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctxlm_ds.families.elmo.config import CHARACTERS, ElmoSection
from ctxlm_ds.families.elmo.lstm import ProjectedLSTM
from ctxlm_ds.families.elmo.softmax import SharedSoftmax
from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.parts.embeddings import WordTable
from ctxlm_ds.models.spec import ModelBuild
from ctxlm_ds.parallel.layers import HiddenDropout, replicated_linear
from ctxlm_ds.parallel.parameters import ZEROS, Constant, Normal, ParameterFacts, Uniform, declare

HIDDEN = ("hidden", "reversed_hidden")
LOSSES = ("forward_loss", "forward_correct", "backward_loss", "backward_correct")
ROW_KEYS = 1 << 24
"""Values of the bits of a row's key that decide whether its states are dropped."""


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


def elmo_layers(model: ElmoSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers that write sums of losses and right predictions of both directions.

    The layers of a direction read complete rows, so ranks do not share positions under sequence parallelism.
    """
    build = replace(build, parallel=replace(build.parallel, sequence_parallel=False))
    settings = {"model": model, "build": build}
    return [
        *_inputs(model, build),
        *(_block(number, model, build) for number in range(model.num_layers)),
        LayerDescription(
            "softmax", SharedSoftmax, (*HIDDEN, "labels", "reversed_labels"), LOSSES, settings,
            no_gradient=frozenset(LOSSES[1::2]),
        ),
    ]  # fmt: skip


def _inputs(model: ElmoSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers that write the vectors of both directions' words, [b, s, p]."""
    if model.inputs == "words":
        assert model.vocab_size is not None
        limit = (6.0 / (model.vocab_size + model.projection_size)) ** 0.5
        table = WordTable(model.vocab_size, model.projection_size, Uniform(limit), build)
        return [table.look_up("input_ids", HIDDEN[0]), table.look_up("reversed_input_ids", HIDDEN[1])]
    return [
        LayerDescription(
            "characters", CharacterEncoder, ("character_ids", "reversed_character_ids"), HIDDEN,
            {"model": model, "build": build}, recompute=build.recompute,
        )
    ]  # fmt: skip


def _block(number: int, model: ElmoSection, build: ModelBuild) -> LayerDescription:
    """Describe one LSTM layer of both directions."""
    carried = tuple(
        f"lstm.{number}.{direction}_{what}" for direction in ("forward", "backward") for what in ("state", "cell")
    )
    return LayerDescription(
        f"lstm.{number}", BidirectionalLayer, (*HIDDEN, *carried), (*HIDDEN, *carried),
        {"model": model, "build": build, "residual": model.residual and number > 0}, carries=frozenset(carried),
        recompute=build.recompute, block=True,
    )  # fmt: skip


class BidirectionalLayer(nn.Module):
    """One LSTM layer of each direction; the directions know nothing of each other."""

    def __init__(self, model: ElmoSection, build: ModelBuild, residual: bool) -> None:
        super().__init__()
        sizes = (model.projection_size, model.cell_size, model.projection_size)
        clips = (model.cell_clip, model.projection_clip)
        self.forward_lstm, self.backward_lstm = ProjectedLSTM(*sizes, clips), ProjectedLSTM(*sizes, clips)
        self.dropout = HiddenDropout(model.dropout, build.kernels, build.parallel)
        self.residual = residual
        self.state_dropout, self.parallel = model.state_dropout, build.parallel

    def forward(
        self, hidden: Tensor, reversed_hidden: Tensor, state: Tensor | None, cell: Tensor | None,
        reversed_state: Tensor | None, reversed_cell: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Map the inputs of both directions [b, s, p] to outputs of that shape, and states [b, p] and cells [b, c]."""
        state, cell, reversed_state, reversed_cell = self._kept(state, cell, reversed_state, reversed_cell)
        ahead = self._run(self.forward_lstm, hidden, 0, state, cell)
        back = self._run(self.backward_lstm, reversed_hidden, 1, reversed_state, reversed_cell)
        return ahead[0], back[0], *ahead[1:], *back[1:]

    def _kept(self, *carried: Tensor | None) -> tuple[Tensor | None, ...]:
        """Set rows of the states to zero in training, the same ones in every layer and direction."""
        first = carried[0]
        if first is None or not self.training or self.state_dropout == 0.0:
            return carried
        keys = self.parallel.dropout.row_keys(len(first), first) & (ROW_KEYS - 1)
        kept = (keys >= self.state_dropout * ROW_KEYS)[:, None]
        return tuple(state if state is None else state.where(kept, 0.0) for state in carried)

    def _run(
        self, lstm: nn.Module, x: Tensor, place: int, state: Tensor | None, cell: Tensor | None
    ) -> tuple[Tensor, ...]:
        x = self.dropout(x, place)
        outputs, state, cell = lstm(x, state, cell)
        # The residual is the dropped input, as in bilm-tf.
        return (outputs + x if self.residual else outputs), state, cell
