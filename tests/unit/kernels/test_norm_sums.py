"""The sum with dropout and norm in steps: the values of the kernels one after another, and the choice by width."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ctxlm_ds.errors import KernelError
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.kernels.dropout import keyed_dropout
from ctxlm_ds.kernels.norm import LAYER, RMS, AddNormSteps, Drop, reference_layer_norm, reference_rms_norm

WIDTH, EPS = 24, 1e-5
DROP = Drop(0.25, torch.tensor(0x5DEECE66D1234567), 48)


@pytest.mark.parametrize("kind", [LAYER, RMS])
@pytest.mark.parametrize("drop", [None, DROP])
@pytest.mark.parametrize("drop_last", [False, True])
def test_steps_are_the_kernels_of_the_run(kind: str, drop: Drop | None, drop_last: bool) -> None:
    kernels = KernelSet({"layer_norm": "reference", "dropout": "torch"}, "cpu", torch.float32)
    draw = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(3, 5, WIDTH, generator=draw) for _ in range(2))
    parameters = tuple(torch.randn(WIDTH, generator=draw) for _ in range(2 if kind == LAYER else 1))
    found = kernels.add_norm(kind, WIDTH)(x, residual, parameters, EPS, drop, drop_last)
    z = residual + (x if drop is None or drop_last else keyed_dropout(x, *drop))
    y = reference_layer_norm(z, *parameters, EPS) if kind == LAYER else reference_rms_norm(z, *parameters, EPS)
    y = y if drop is None or not drop_last else keyed_dropout(y, *drop)
    assert torch.equal(found[0], z) and torch.equal(found[1], y)


def test_norms_of_one_kind_and_width_share_their_kernel() -> None:
    kernels = KernelSet({}, "cpu", torch.float32)
    assert kernels.add_norm(LAYER, 8) is kernels.add_norm(LAYER, 8)
    specs = [kernel.spec for kernel in map(kernels.add_norm, (LAYER, RMS, LAYER), (8, 8, 16))]
    assert specs[0] == replace(specs[2], width=8) and specs[1].norm is kernels.rms_norm
    assert isinstance(kernels.add_norm(LAYER, 8), AddNormSteps) and "add_norm torch" in kernels.describe()


def test_a_norm_too_wide_for_triton_is_refused_by_name_and_taken_in_steps_by_auto(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    named = KernelSet({"add_norm": "triton"}, "cuda", torch.bfloat16)
    named.add_norm(LAYER, 8192)
    assert named.names["add_norm"] == "triton"
    with pytest.raises(KernelError, match=r"at most 8192 wide, and this model has one of 12288.*\(`torch` here\)"):
        named.add_norm(LAYER, 12288)
    assert isinstance(KernelSet({}, "cuda", torch.bfloat16).add_norm(LAYER, 12288), AddNormSteps)
