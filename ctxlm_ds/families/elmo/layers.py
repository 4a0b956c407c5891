"""ELMo (Peters 2018; bilm-tf) as a list of layers: words' vectors, LSTM layers of two directions, the softmax.

Shape letters: b rows, s positions, i inputs, p projected width, c cells. An LSTM's gates are in torch's order: input,
forget, cell, output.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from ctxlm_ds.families.elmo.config import CHARACTERS, ElmoSection
from ctxlm_ds.families.elmo.softmax import SharedSoftmax
from ctxlm_ds.models.layers import LayerDescription, ModelBuild
from ctxlm_ds.models.parts.embeddings import WordTable
from ctxlm_ds.parallel.layers import HiddenDropout, ReplicatedLinear
from ctxlm_ds.parallel.parameters import ZEROS, Constant, Normal, ParameterFacts, Uniform, declare

FORGET_BIAS = 1.0


class ProjectedLSTM(nn.Module):
    """One layer of one direction, whose cells and outputs are clipped (Sak 2014; TensorFlow's LSTMCell).

    No vendor's kernel clips within a step. Here one product computes the inputs' part of all gates of a window, a step
    adds the state's part, and the backward pass makes one product for each weight's gradient of the window. The forget
    gate's bias has 1 added, which is not part of the weights.
    """

    def __init__(self, inputs: int, cells: int, outputs: int, clips: tuple[float | None, float | None]) -> None:
        """Make the weights; `clips` bound cells and outputs, None does not."""
        super().__init__()
        self.clips = clips
        self.weight_ih = nn.Parameter(torch.empty(4 * cells, inputs))
        self.weight_hh = nn.Parameter(torch.empty(4 * cells, outputs))
        self.bias = nn.Parameter(torch.empty(4 * cells))
        self.weight_hr = nn.Parameter(torch.empty(outputs, cells))
        # TensorFlow's glorot_uniform of one matrix for inputs and state.
        gates = ParameterFacts(Uniform((6.0 / (inputs + outputs + 4 * cells)) ** 0.5), decays=True, matrix=True)
        projection = ParameterFacts(Uniform((6.0 / (cells + outputs)) ** 0.5), decays=True, matrix=True)
        declare(self, weight_ih=gates, weight_hh=gates, weight_hr=projection, bias=ParameterFacts(ZEROS, decays=False))

    def forward(self, x: Tensor, state: Tensor | None, cell: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Map x [b, s, i] to outputs [b, s, p]; also return the last state [b, p] and cell [b, c].

        `state` and `cell` are those before the first step, None for zeros.
        """
        outputs, cells = self.weight_hr.shape
        state = x.new_zeros(len(x), outputs) if state is None else state
        cell = x.new_zeros(len(x), cells) if cell is None else cell
        steps, forget = x.transpose(0, 1).contiguous(), torch.zeros_like(self.bias)
        forget[cells : 2 * cells] = FORGET_BIAS
        # On a CPU torch's layer takes 1.3 times as long.
        compute = self._vendor if self.clips == (None, None) and x.device.type != "cpu" else self._clipped
        found, state, cell = compute(steps, forget, state, cell)
        return found.transpose(0, 1), state, cell

    def _clipped(self, steps: Tensor, forget: Tensor, state: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gates = F.linear(steps, self.weight_ih, self.bias + forget)
        return _ClippedLSTM.apply(gates, state, cell, self.weight_hh, self.weight_hr, self.clips)

    def _vendor(self, steps: Tensor, forget: Tensor, state: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = [self.weight_ih, self.weight_hh, self.bias, forget, self.weight_hr]
        start = (state[None], cell[None])
        found, state, cell = torch._VF.lstm(steps, start, weights, True, 1, 0.0, self.training, False, False)
        return found, state[0], cell[0]


class _ClippedLSTM(Function):
    """All steps of a window from the inputs' part of the gates [s, b, 4c], in buffers that are made once."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, state: Tensor, cell: Tensor, weight_hh: Tensor, weight_hr: Tensor,
        clips: tuple[float | None, float | None],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        (num_steps, rows, _), (_, size), (cell_clip, output_clip) = inputs.shape, cell.shape, clips
        gates, activated = torch.empty_like(inputs), cell.new_empty(num_steps, rows, size)
        cells, states = cell.new_empty(num_steps + 1, rows, size), cell.new_empty(num_steps + 1, *state.shape)
        hidden = torch.empty_like(cell)
        cells[0], states[0] = cell, state
        to_gates, to_output = weight_hh.t(), weight_hr.t()
        for given, gate, before, after, active, h, output in zip(
            inputs, gates, cells[:-1], cells[1:], activated, states[:-1], states[1:], strict=True
        ):
            torch.addmm(given, h, to_gates, out=gate)
            gate[:, : 2 * size].sigmoid_()
            i, f, g, o = gate.split(size, dim=1)
            g.tanh_()
            o.sigmoid_()
            torch.mul(f, before, out=after).addcmul_(i, g)
            _clip(after, cell_clip)
            torch.tanh(after, out=active)
            torch.mm(torch.mul(o, active, out=hidden), to_output, out=output)
            _clip(output, output_clip)
        ctx.save_for_backward(gates, cells, activated, states, weight_hh, weight_hr)
        ctx.clips = clips
        return states[1:], states[-1].clone(), cells[-1].clone()

    @staticmethod
    def backward(ctx: Any, of_outputs: Tensor, of_state: Tensor, of_cell: Tensor) -> Any:
        gates, cells, activated, states, weight_hh, weight_hr = ctx.saved_tensors
        cell_clip, output_clip = ctx.clips
        size = cells.shape[-1]
        of_gates, of_projected = torch.empty_like(gates), torch.empty_like(of_outputs)
        inside = _inside(cells[1:], cell_clip), _inside(states[1:], output_clip)
        of_state, of_cell, of_hidden = of_state.clone(), of_cell.clone(), torch.empty_like(of_cell)
        sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
        tanh_backward = torch.ops.aten.tanh_backward.grad_input
        for t in reversed(range(len(gates))):
            (i, f, g, o), active, arriving = gates[t].split(size, dim=1), activated[t], of_projected[t]
            of_i, of_f, of_g, of_o = of_gates[t].split(size, dim=1)
            torch.add(of_outputs[t], of_state, out=arriving)
            if inside[1] is not None:
                arriving.mul_(inside[1][t])
            torch.mm(arriving, weight_hr, out=of_hidden)
            sigmoid_backward(torch.mul(of_hidden, active, out=of_o), o, grad_input=of_o)
            of_cell += tanh_backward(of_hidden.mul_(o), active, grad_input=of_hidden)
            if inside[0] is not None:
                of_cell.mul_(inside[0][t])
            sigmoid_backward(torch.mul(of_cell, g, out=of_i), i, grad_input=of_i)
            sigmoid_backward(torch.mul(of_cell, cells[t], out=of_f), f, grad_input=of_f)
            tanh_backward(torch.mul(of_cell, i, out=of_g), g, grad_input=of_g)
            of_cell.mul_(f)
            torch.mm(of_gates[t], weight_hh, out=of_state)
        flat, projected = of_gates.flatten(0, 1), of_projected.flatten(0, 1)
        hidden = gates[..., 3 * size :] * activated
        of_weight_hh, of_weight_hr = flat.t() @ states[:-1].flatten(0, 1), projected.t() @ hidden.flatten(0, 1)
        return of_gates, of_state, of_cell, of_weight_hh, of_weight_hr, None


def _clip(x: Tensor, bound: float | None) -> None:
    if bound is not None:
        x.clamp_(-bound, bound)


def _inside(clipped: Tensor, bound: float | None) -> Tensor | None:
    """Return where gradients pass: a value at the bound was clipped."""
    return None if bound is None else clipped.abs() < bound


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
        self.projection = ReplicatedLinear(width, model.projection_size, Normal(width**-0.5), build.kernels)

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
        self.carry = ReplicatedLinear(width, width, init, build.kernels)
        self.transform = ReplicatedLinear(width, width, init, build.kernels)
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
