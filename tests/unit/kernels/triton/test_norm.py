"""Triton's sum with dropout and norm against float64 and the steps; masks, both orders, and layers built with it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.kernels.dropout import keyed_dropout
from ctxlm_ds.kernels.norm import LAYER, RMS, Drop
from tests.unit.kernels.triton.interpreter import in_interpreter

pytestmark = pytest.mark.long

EPS = 1e-5
KEY = torch.tensor(0x5DEECE66D1234567)
SHAPES = [((5, 96), 12 * 96), ((2, 3, 50), 0), ((3, 77), 9)]
"""Rows and width, and the place of the first element: whole words of the hash, parts of them, and an odd place."""


class Case:
    """Inputs in a type, and arriving gradients, for norms of a kind with a bias or without."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, kind: str, biased: bool = True) -> None:
        draw = torch.Generator().manual_seed(sum(shape))
        self.dtype, self.kind, self.width = dtype, kind, shape[-1]
        x, residual, *arriving = (torch.randn(shape, generator=draw) for _ in range(4))
        weight, bias = (1.0 + 0.3 * torch.randn(self.width, generator=draw) for _ in range(2))
        given = [3.0 * x + 1.0, residual, weight] + ([bias] if kind == LAYER and biased else [])
        self.given, self.arriving = [x.to(dtype) for x in given], [x.to(dtype) for x in arriving]

    def run(self, kernel: Any, dtype: torch.dtype, drop: Drop | None, drop_last: bool, streams: bool) -> list[Tensor]:
        """Return sum, norm and the gradients of all inputs, of the norm alone or of both results (`streams`)."""
        x, residual, *parameters = given = [x.to(dtype).requires_grad_() for x in self.given]
        named = (*parameters, *[None] * (2 - len(parameters))) if self.kind == LAYER else tuple(parameters)
        z, y = kernel(x, residual, named, EPS, drop, drop_last)
        results, arriving = ((z, y), self.arriving) if streams else ((y,), self.arriving[:1])
        return [z, y, *torch.autograd.grad(results, given, [x.to(dtype) for x in arriving])]

    def check(self, drop: Drop | None, drop_last: bool, streams: bool) -> list[Tensor]:
        """Compare the kernel with float64, in 16 bits by the error of the steps; return its results."""
        from ctxlm_ds.kernels.triton.norm import triton_add_norm

        steps = KernelSet({"dropout": "torch"}, "cpu", self.dtype).add_norm(self.kind, self.width)
        exact, plain, found = (
            self.run(kernel, dtype, drop, drop_last, streams)
            for kernel, dtype in ((steps, torch.float64), (steps, self.dtype), (triton_add_norm, self.dtype))
        )
        for wanted, other, ours in zip(exact, plain, found, strict=True):
            errors = ours.double() - wanted, other.double() - wanted
            assert ours.dtype == self.dtype
            if self.dtype == torch.float32:
                assert errors[0].abs().max() <= 2e-6 * wanted.abs().max()
            else:  # Few numbers round by chance.
                assert errors[0].norm() <= 1.15 * errors[1].norm()
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [LAYER, RMS])
@pytest.mark.parametrize(("drop_last", "streams"), [(False, False), (False, True), (True, False)])
@in_interpreter
def test_values_and_gradients_are_those_of_float64(
    dtype: torch.dtype, kind: str, drop_last: bool, streams: bool
) -> None:
    for shape, first in SHAPES if dtype == torch.float32 else SHAPES[:1]:
        Case(shape, dtype, kind).check(Drop(0.1, KEY, first), drop_last, streams)


@in_interpreter
def test_without_dropout_or_bias_the_values_are_those_of_float64_too() -> None:
    for kind in (LAYER, RMS):
        case = Case((3, 40), torch.float32, kind, biased=False)
        for drop in (None, Drop(0.3, KEY)):
            case.check(drop, False, True)


@pytest.mark.parametrize("drop_last", [False, True])
@in_interpreter
def test_the_dropped_elements_are_those_of_the_plain_hash(drop_last: bool) -> None:
    for (shape, first), key in zip(SHAPES, (KEY, -KEY, KEY), strict=True):
        case, drop = Case(shape, torch.bfloat16, LAYER), Drop(0.4, key, first)
        z, y, of_x, of_residual, *_ = case.check(drop, drop_last, True)
        kept = keyed_dropout(torch.ones(shape), *drop) != 0
        if drop_last:
            assert torch.equal(y != 0, kept) and torch.equal(of_x, of_residual)
        else:
            assert torch.equal(of_x != 0, kept) and torch.equal(z == case.given[1], ~kept)


@in_interpreter
def test_sums_over_rows_are_those_of_float64_and_equal_each_time() -> None:
    from ctxlm_ds.kernels.triton import norm

    case, before = Case((11, 32), torch.float32, LAYER), norm.PROGRAMS
    norm.PROGRAMS = 4  # rows that no program shares evenly
    try:
        first, again = (case.check(Drop(0.1, KEY), False, False) for _ in range(2))
    finally:
        norm.PROGRAMS = before
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


@in_interpreter
def test_operators_return_what_they_declare() -> None:
    from ctxlm_ds.kernels.triton import norm

    check = partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    x, residual, weight, bias = (torch.randn(*n, 16, requires_grad=True) for n in ((2, 3), (2, 3), (), ()))
    for layer, drop_last, key in ((True, False, KEY), (False, True, KEY), (True, False, None)):
        shift, p = bias if layer else None, 0.0 if key is None else 0.1
        check(norm.add_norm, (x, residual, weight, shift, key, EPS, p, 5, layer, drop_last))
        z, y, *statistics = norm.add_norm(x, residual, weight, shift, key, EPS, p, 5, layer, drop_last)
        given = [tensor.detach() for tensor in (y, y, z, weight)], [x.detach() for x in statistics]
        check(norm.add_norm_gradient, (*given[0], key, *given[1], p, 5, layer, drop_last))
