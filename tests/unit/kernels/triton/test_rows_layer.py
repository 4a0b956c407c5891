"""Transformer layers with the rows `triton`, computed by the interpreter, against layers with the rows of torch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.kernels.implementation import Implementation
from ctxlm_ds.kernels.triton.rows import ROWS
from ctxlm_ds.models.layers import ModelBuild
from ctxlm_ds.models.program import build_program
from ctxlm_ds.registry import KERNELS
from tests.encoder_batches import tiny_model
from tests.unit.kernels.triton.interpreter import in_interpreter

pytestmark = pytest.mark.long

OPERATIONS = ("rotary", "bias_gelu")
FAMILIES = {
    "llama": ("logits", dict(num_key_value_heads=2, hidden_activation="silu")),
    "modernbert": ("predicted_logits", dict(hidden_activation="gelu")),
}
"""A family -> what is read of it, and settings."""
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 0], [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8]])


def results(family: str, kernels: KernelSet, recompute: bool = False) -> list[torch.Tensor]:
    """Return the output of the second layer, and the gradients of its input and weights."""
    output, settings = FAMILIES[family]
    model = tiny_model(family=family, **settings)
    program = build_program(model, ModelBuild((output,), kernels, shares_rows=True))
    described = [layer for layer in program.layers if layer.block][1]
    layer, draw = described.factory(**described.kwargs), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=draw) + float(weight.ndim == 1))
    hidden = torch.randn(2, 12, model.width, generator=draw).requires_grad_()
    given = hidden, (POSITIONS == 0).cumsum(1), torch.tensor([[0, 7, 11, 12], [0, 3, 12, 12]]), POSITIONS
    call = partial(checkpoint, layer, use_reentrant=False) if recompute else layer
    out = call(*given, **described.call_kwargs)
    upstream = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, [hidden, *layer.parameters()], upstream)]


@pytest.mark.parametrize("family", FAMILIES)
@in_interpreter
def test_a_layer_has_the_results_of_the_rows_of_torch(family: str) -> None:
    for operation in OPERATIONS:
        KERNELS.register(f"{operation}.interpreted", Implementation("interpreted", ROWS[operation].make))
    kernels = KernelSet(dict.fromkeys(OPERATIONS, "interpreted"), "cpu", torch.float32)
    found = results(family, kernels)
    assert "rotary interpreted" in kernels.describe() and "bias_gelu interpreted" in kernels.describe()
    plain = results(family, KernelSet(dict.fromkeys(OPERATIONS, "torch"), "cpu", torch.float32))
    for one, again, wanted in zip(found, results(family, kernels, recompute=True), plain, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=2e-6 * wanted.abs().max().item())
        assert torch.equal(one, again)
