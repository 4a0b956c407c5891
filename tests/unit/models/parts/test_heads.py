"""SpanBERT's boundary head against torch's own layers, computed span by span."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import ModelBuild
from ctxlm_ds.models.parts.heads import BOUNDARY_POSITION_WIDTH, SpanBoundaryHead
from ctxlm_ds.parallel.parameters import Normal, initialize_parameters

ROWS, POSITIONS, SLOTS, WIDTH, PREDICTED = 3, 20, 6, 8, 5


def test_the_boundary_head_is_two_layers_over_both_boundaries_and_a_position() -> None:
    build = ModelBuild((), KernelSet({}, "cpu", torch.float32))
    head = SpanBoundaryHead(WIDTH, 1e-12, "gelu", Normal(0.5), build, PREDICTED)
    initialize_parameters(head, seed=3)
    rng = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, POSITIONS, WIDTH, generator=rng, requires_grad=True)
    positions = torch.randint(POSITIONS, (ROWS, 2 * SLOTS), generator=rng)
    offsets = torch.randint(15, (ROWS, SLOTS), generator=rng)
    got = head(hidden, torch.ones(ROWS, POSITIONS, dtype=torch.long), positions, offsets)
    assert got.shape == (ROWS, SLOTS, PREDICTED)
    assert head.position_embeddings.weight.shape == (15, BOUNDARY_POSITION_WIDTH)
    parameters = dict(head.named_parameters())
    for row in range(ROWS):
        for slot in range(SLOTS):
            left, right = positions[row, slot], positions[row, SLOTS + slot]
            place = parameters["position_embeddings.weight"][offsets[row, slot]]
            x = torch.cat([hidden[row, left], hidden[row, right], place])
            for layer, width in (("first", WIDTH), ("second", PREDICTED)):
                x = F.gelu(F.linear(x, parameters[f"{layer}.weight"], parameters[f"{layer}.bias"]))
                norm = parameters[f"{layer}_layer_norm.weight"], parameters[f"{layer}_layer_norm.bias"]
                x = F.layer_norm(x, (width,), *norm, eps=1e-12)
            torch.testing.assert_close(got[row, slot], x, rtol=1e-5, atol=1e-5)
