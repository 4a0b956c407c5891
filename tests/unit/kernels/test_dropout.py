"""Keyed dropout against splitmix64 in numpy, and its statistics within four standard errors."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from ctxlm_ds.kernels.dropout import DropoutKernel, compiled_dropout, keyed_dropout, loop_dropout
from ctxlm_ds.kernels.implementation import why_compiled_cannot_run

LANES = 1 << 16
KEYS = [0, 1, -1, 0x0123456789ABCDEF, -(1 << 63), 0x5DEECE66D1234567]
MANY = 1 << 20


def key_of(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int64)


def splitmix64(count: int, key: int) -> NDArray[np.uint64]:
    """The first outputs of splitmix64 (Steele 2014) seeded with `key`."""
    with np.errstate(over="ignore"):
        z = np.uint64(key % (1 << 64)) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def kept_by_definition(count: int, p: float, key: int) -> NDArray[np.bool_]:
    """[count]: four 16-bit lanes of each word, the lowest first; the smallest p · 2^16 signed values are dropped."""
    words = splitmix64(-(-count // 4), key)
    lanes = np.stack([(words >> np.uint64(16 * lane)) & np.uint64(0xFFFF) for lane in range(4)], axis=1).flatten()
    signed = lanes.astype(np.int64)
    signed[signed >= LANES // 2] -= LANES
    return (signed + LANES // 2 >= round(p * LANES))[:count]


def kept(count: int, p: float, key: int, first: int = 0) -> Tensor:
    """[count] bool."""
    return keyed_dropout(torch.ones(count), p, key_of(key), first) != 0


def test_splitmix64_itself() -> None:
    """The outputs for seed 1234567 of the published C code, as test suites of other languages quote them."""
    assert splitmix64(3, 1234567).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("key", KEYS)
def test_masks_are_those_of_splitmix64(key: int, p: float) -> None:
    for count in (1, 3, 4, 1001):
        assert np.array_equal(kept(count, p, key).numpy(), kept_by_definition(count, p, key))


@pytest.mark.parametrize("p", [0.1, 0.3, 1 / LANES, 0.25])
def test_the_rate_is_exact_to_a_lane(p: float) -> None:
    """What is dropped of all lane values is p; what is dropped of many elements is p within four standard errors."""
    threshold = round(p * LANES)
    assert abs(threshold / LANES - p) <= 0.5 / LANES
    rates = [1 - kept(MANY, p, key).double().mean().item() for key in KEYS[3:]]
    for rate in rates:
        assert abs(rate - threshold / LANES) < 4 * math.sqrt(p * (1 - p) / MANY)


def test_what_stays_is_scaled_by_the_exact_rate() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    dropped = keyed_dropout(x, 0.1, key_of(KEYS[3]))
    scale = LANES / (LANES - round(0.1 * LANES))
    assert torch.equal(dropped, torch.where(kept(1000, 0.1, KEYS[3]), x * scale, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mask_does_not_depend_on_type_or_shape(dtype: torch.dtype) -> None:
    dropped = keyed_dropout(torch.ones(5, 7, 11, dtype=dtype), 0.3, key_of(KEYS[3]))
    assert dropped.dtype == dtype
    assert torch.equal(dropped.flatten() != 0, kept(5 * 7 * 11, 0.3, KEYS[3]))


@pytest.mark.parametrize(("first", "count"), [(0, 10), (4, 8), (5, 9), (7, 1), (13, 100), (250, 6), (1, 255)])
def test_a_share_is_the_slice_of_the_whole(first: int, count: int) -> None:
    whole = kept(256, 0.4, KEYS[5])
    assert torch.equal(kept(count, 0.4, KEYS[5], first), whole[first : first + count])


@pytest.mark.parametrize("first", [0, 6])
def test_the_gradient_is_the_mask_times_the_scale(first: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 50, generator=generator, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    keyed_dropout(x, 0.2, key_of(KEYS[4]), first).backward(upstream)
    factors = keyed_dropout(torch.ones(3, 50, dtype=torch.float64), 0.2, key_of(KEYS[4]), first)
    assert set(factors.unique().tolist()) == {0.0, LANES / (LANES - round(0.2 * LANES))}
    assert x.grad is not None and torch.equal(x.grad, factors * upstream)


def test_values_that_are_not_finite_are_dropped_like_others() -> None:
    x = torch.full((1000,), float("inf"))
    dropped = keyed_dropout(x, 0.5, key_of(KEYS[3]))
    assert torch.equal(dropped == 0, ~kept(1000, 0.5, KEYS[3]))
    assert not dropped.isnan().any()


@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("pair", [(KEYS[3], KEYS[5]), (KEYS[3], KEYS[3] ^ 1), (0x7654321089ABCDEF, -77)])
def test_two_keys_drop_independently(pair: tuple[int, int], lag: int) -> None:
    p = 0.3
    one, other = (kept(MANY, p, key).double() - (1 - p) for key in pair)
    products = one[: MANY - lag] * other[lag:] / (p * (1 - p))
    assert abs(products.mean().item()) < 4 / math.sqrt(MANY - lag)


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 768])
def test_elements_of_one_mask_drop_independently(lag: int) -> None:
    p = 0.3
    mask = kept(MANY, p, KEYS[5]).double() - (1 - p)
    correlation = (mask[:-lag] * mask[lag:]).mean().item() / (p * (1 - p))
    assert abs(correlation) < 4 / math.sqrt(MANY - lag)


def with_gradient(
    kernel: DropoutKernel, x: Tensor, key: Tensor, first: int, upstream: Tensor, p: float = 0.1
) -> list[Tensor]:
    dropped = kernel(x, p, key, first)
    return [dropped, *torch.autograd.grad(dropped, x, upstream)]


@pytest.mark.skipif(why_compiled_cannot_run("cpu") is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("first", "columns"),
    [
        ((1 << 33) + 6, 33),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((0, 1), (3, 40), (1 << 33, 5000))),
    ],
)
def test_compiled_masks_and_gradients_are_those_of_eager(first: int, columns: int) -> None:
    """Sizes that are no multiple of a vector, and shares far into the whole, included."""
    compiled = torch.compile(keyed_dropout, dynamic=False)
    x = torch.randn(4, columns, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for key in map(key_of, KEYS):
        found = [with_gradient(kernel, x, key, first, torch.ones_like(x)) for kernel in (keyed_dropout, compiled)]
        assert all(torch.equal(eager, other) for eager, other in zip(*found, strict=True))


@pytest.mark.skipif(why_compiled_cannot_run("cpu") is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.soak)])
def test_the_compiled_row_reads_and_writes_each_element_once(dtype: torch.dtype) -> None:
    """Of inductor's code: one kernel and one buffer, which is the result; the backward pass runs the same code."""
    x = torch.randn(66, 33, generator=torch.Generator().manual_seed(0)).to(dtype).t().requires_grad_()
    upstream = torch.linspace(-3, 3, x.numel()).view(33, 66).to(dtype)
    for key, first in ((KEYS[5], (1 << 33) + 6), (KEYS[2], 0)):
        torch._dynamo.reset()
        found, codes = run_and_get_code(with_gradient, compiled_dropout, x, key_of(key), first, upstream)
        expected = with_gradient(keyed_dropout, x, key_of(key), first, upstream)
        assert found[0].dtype == dtype and torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        for code in codes:
            assert len(re.findall(r"^ +cpp_fused\w*\(", code, re.MULTILINE)) == 1
            assert re.findall(r"= empty_strided_cpu\(.*, (torch\.\w+)\)", code) == [str(dtype)]
        assert 1 <= len(codes) <= 2


def test_the_compiled_row_makes_no_kernel_for_each_first_place(monkeypatch: pytest.MonkeyPatch) -> None:
    given: set[int] = set()

    def shifted(x: Tensor, p: float, key: Tensor, first: int) -> Tensor:
        given.add(first)
        return keyed_dropout(x, p, key, first)

    monkeypatch.setattr("ctxlm_ds.kernels.dropout._shifted", shifted)
    x = torch.ones(37)
    for first in (0, 3, 128, 28_673, (1 << 33) + 2):
        for key in map(key_of, KEYS):
            assert torch.equal(compiled_dropout(x, 0.3, key, first), keyed_dropout(x, 0.3, key, first))
    assert given <= set(range(4))


@pytest.mark.skipif(why_compiled_cannot_run("cpu") is not None, reason="needs a C++ compiler")
def test_a_compiled_layer_takes_the_compiled_row() -> None:
    def layer(x: Tensor, key: Tensor) -> Tensor:
        return compiled_dropout(x.sin(), 0.3, key) * x

    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, dynamic=False)):
        dropped = function(x, key_of(KEYS[3]))
        results.append([dropped, *torch.autograd.grad(dropped.sum(), x)])
    torch.testing.assert_close(*results)
    assert torch.equal(results[0][0] == 0, ~kept(35, 0.3, KEYS[3]).view(5, 7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("first", "shape"), [(0, (5, 7, 11)), (5, (1,)), (3, (33, 129)), (1 << 33, (4, 5000))])
def test_the_loop_gives_the_same_numbers_and_gradients(first: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, upstream = (torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(2))
    x.requires_grad_()
    for key, p in [(KEYS[3], 0.1), (KEYS[4], 0.5), (KEYS[2], 0.0)]:
        plain, loop = (with_gradient(kernel, x, key_of(key), first, upstream, p)
                       for kernel in (keyed_dropout, loop_dropout))  # fmt: skip
        assert loop[0].dtype == dtype and all(torch.equal(*pair) for pair in zip(plain, loop, strict=True))


def test_elements_drop_by_place_and_the_loop_keeps_what_is_not_finite() -> None:
    x, whole = torch.ones(6, 10).T, keyed_dropout(torch.ones(10, 6), 0.3, key_of(5))
    assert all(torch.equal(kernel(x, 0.3, key_of(5)), whole) for kernel in (keyed_dropout, loop_dropout))
    assert loop_dropout(torch.ones(0, 3), 0.3, key_of(5)).shape == (0, 3)
    for dtype in (torch.bfloat16, torch.float32):
        bad = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf")], dtype=dtype).repeat(100)
        expected = keyed_dropout(bad, 0.5, key_of(9))
        assert torch.equal(loop_dropout(bad, 0.5, key_of(9)).nan_to_num(), expected.nan_to_num())
        assert torch.equal(loop_dropout(bad, 0.5, key_of(9)).isnan(), expected.isnan())
