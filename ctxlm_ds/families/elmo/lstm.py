"""An LSTM layer with a projection whose cells and outputs are clipped (Sak 2014; TensorFlow's LSTMCell).

No vendor's kernel clips within a step. Here one product computes the inputs' part of all gates of a window, a step adds
the state's part, and the backward pass makes one product for each weight's gradient of the window. The forget gate's
bias has 1 added, which is not part of the weights.

Shape letters: s steps, b rows, i inputs, c cells, p projected width. Gates are in torch's order: input, forget, cell,
output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from ctxlm_ds.parallel.parameters import ZEROS, ParameterFacts, Uniform, declare

FORGET_BIAS = 1.0


class ProjectedLSTM(nn.Module):
    """One layer of one direction."""

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
