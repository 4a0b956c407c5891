"""The LSTM layer beside a plain float64 version of TensorFlow's LSTMCell, numerical gradients, and torch's layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ctxlm_ds.families.elmo.layers import ProjectedLSTM

ROWS, STEPS, INPUTS, CELLS, OUTPUTS = 3, 5, 4, 6, 2
CLIPS = [(3.0, 3.0), (0.2, 0.05), (None, 0.05), (0.2, None)]
Clips = tuple[float | None, float | None]


def layer(clips: Clips) -> ProjectedLSTM:
    torch.manual_seed(1)
    module = ProjectedLSTM(INPUTS, CELLS, OUTPUTS, clips).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(2)
    shapes = (ROWS, STEPS, INPUTS), (ROWS, OUTPUTS), (ROWS, CELLS)
    x, state, cell = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return x, state * 0.02, cell * 0.1


def plain(module: ProjectedLSTM, x: Tensor, state: Tensor, cell: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """rnn_cell_impl.LSTMCell without peepholes: forget bias 1, clipped cells, clipped projection."""

    def sigmoid(value: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-value))

    def bounded(value: np.ndarray, bound: float | None) -> np.ndarray:
        return value if bound is None else np.clip(value, -bound, bound)

    weights = {name: value.detach().numpy() for name, value in module.named_parameters()}
    h, c, outputs = state.numpy(), cell.numpy(), []
    for t in range(STEPS):
        gates = x.numpy()[:, t] @ weights["weight_ih"].T + h @ weights["weight_hh"].T + weights["bias"]
        i, f, j, o = np.split(gates, 4, axis=1)
        c = bounded(sigmoid(f + 1) * c + sigmoid(i) * np.tanh(j), module.clips[0])
        h = bounded((sigmoid(o) * np.tanh(c)) @ weights["weight_hr"].T, module.clips[1])
        outputs.append(h)
    return np.stack(outputs, axis=1), h, c


@pytest.mark.parametrize("clips", [*CLIPS, (None, None)])
def test_steps_are_those_of_tensorflows_cell(clips: Clips) -> None:
    module = layer(clips)
    for got, wanted in zip(module(*inputs()), plain(module, *inputs()), strict=True):
        np.testing.assert_allclose(got.detach().numpy(), wanted, rtol=1e-10, atol=1e-12)
    start = torch.zeros(ROWS, OUTPUTS, dtype=torch.float64), torch.zeros(ROWS, CELLS, dtype=torch.float64)
    assert torch.equal(module(inputs()[0], None, None)[0], module(inputs()[0], *start)[0])


@pytest.mark.parametrize("clips", CLIPS)
def test_gradients_are_numerical_ones(clips: Clips) -> None:
    module = layer(clips)
    parameters = dict(module.named_parameters())

    def call(x: Tensor, state: Tensor, cell: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        return torch.func.functional_call(module, dict(zip(parameters, values, strict=True)), (x, state, cell))

    given = [value.detach().requires_grad_() for value in (*inputs(), *parameters.values())]
    assert torch.autograd.gradcheck(call, given)


def test_without_clipping_the_vendors_layer_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As do bounds that nothing reaches."""
    found = []
    for clips in ((None, None), (100.0, 100.0)):
        module = layer(clips)
        if clips == (None, None):
            monkeypatch.setattr(module, "_clipped", module._vendor)
        outputs, state, cell = module(*inputs())
        (outputs.sum() + state.square().sum() + cell.sum()).backward()
        found.append([outputs, state, cell, *(parameter.grad for parameter in module.parameters())])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
