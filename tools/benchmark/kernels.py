"""This project's Triton kernels on a GPU: right, the same twice, inside a CUDA graph, and their time next to torch's.

It needs torch, triton and numpy only. The times go into ctxlm_ds/kernels/figures.json, by which `auto` chooses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ctxlm_ds.atomic import write_text
from ctxlm_ds.kernels import norm as norm_kernels
from ctxlm_ds.kernels.attention_spec import AttentionCall, AttentionSpec, ProbabilityKeys, Sequences
from ctxlm_ds.kernels.bias_gelu import GATED
from ctxlm_ds.kernels.dispatch import OPERATIONS
from ctxlm_ds.kernels.dropout import compiled_dropout, keyed_dropout
from ctxlm_ds.kernels.implementation import Need
from ctxlm_ds.kernels.norm import AddNormSpec, Drop
from ctxlm_ds.kernels.rotary import Angles
from ctxlm_ds.kernels.triton.rows import FIGURES, Figure, measured
from tools.benchmark.tables import NOTHING, Table

ROW = "triton"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP32_ERROR = 2e-6
"""Largest error of a kernel in fp32, over the largest value."""
MORE = 1.5
"""A kernel in 16 bits may have so many times the error of torch's row, or round the exact number once."""
Timer = Callable[[Callable[[], object]], float]
"""Returns the microseconds of a function."""


@dataclass(frozen=True)
class Case:
    """One operation at one shape."""

    operation: str
    torch_row: str
    """The row that is right."""
    shape: tuple[int, ...]
    inputs: Callable[[tuple[int, ...], torch.dtype], list[Tensor]]
    """Draws the inputs on the CPU."""
    run: Callable[[Any, Sequence[Tensor]], Sequence[Tensor]]
    """Returns values and gradients of a kernel; it may write into the inputs."""
    is_exact: bool = False
    """Whether the kernel's numbers are those of torch's row on a CPU, bit for bit."""
    spec: Any = None
    """Of a Need; a function makes it for a device and the shape."""
    rival: str = ""
    """The row that the kernel is timed against; empty is torch_row."""


@dataclass(frozen=True)
class Checks:
    """What was found of a case in one type."""

    case: Case
    dtype: torch.dtype
    is_right: bool
    error: float
    """Over the largest value, against float64."""
    torch_error: float
    repeats: bool
    """Whether two runs gave equal bits."""
    in_graph: bool | None
    """Whether a replayed CUDA graph gave equal bits; None on a CPU."""


def _normal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def _dropout_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [_normal(shape, dtype), _normal((*shape, 1), dtype)[..., 0], torch.tensor(0x5DEECE66D1234567)]


def _dropout(kernel: Any, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    x, upstream, key = inputs
    x = x.detach().requires_grad_()
    value = kernel(x, 0.1, key)
    return value.detach(), *torch.autograd.grad(value, x, upstream)


def _loss_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    logits = 4 * _normal(shape, torch.float32)
    return [logits.to(dtype), torch.arange(shape[0]) * 12 % shape[1]]


def _loss(kernel: Any, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    logits, labels = inputs
    largest, word, total, of_label = kernel.statistics(logits, labels)
    gradient = kernel.gradient(logits, labels, largest + total.log())
    return largest, word, total, of_label, gradient


def _norm_spec(kind: str) -> Callable[[str, tuple[int, ...]], AddNormSpec]:
    """Return the spec of a norm whose torch row drops as `auto` does on the device."""

    def spec(device: str, shape: tuple[int, ...]) -> AddNormSpec:
        norm = norm_kernels.torch_layer_norm if kind == norm_kernels.LAYER else norm_kernels.torch_rms_norm
        return AddNormSpec(kind, shape[-1], norm, keyed_dropout if device == "cpu" else compiled_dropout)

    return spec


def _norm_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    x, residual, *upstream = _normal((4, *shape), dtype).unbind()
    weight, bias = (_normal((2, shape[-1]), torch.float32) + 1.0).to(dtype).unbind()
    return [x, residual, weight, bias, *upstream, torch.tensor(0x5DEECE66D1234567)]


def _add_norm(kernel: Any, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    x, residual, weight, bias, of_sum, of_norm, key = inputs
    leaves = [tensor.detach().requires_grad_() for tensor in (x, residual, weight, bias)]
    total, normed = kernel(leaves[0], leaves[1], tuple(leaves[2:]), 1e-5, Drop(0.1, key))
    gradients = torch.autograd.grad((total, normed), leaves, (of_sum, of_norm))
    return total.detach(), normed.detach(), *gradients


def _add_rms_norm(kernel: Any, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    x, residual, weight, _, of_sum, of_norm, key = inputs
    leaves = [tensor.detach().requires_grad_() for tensor in (x, residual, weight)]
    total, normed = kernel(leaves[0], leaves[1], (leaves[2],), 1e-5, Drop(0.1, key))
    gradients = torch.autograd.grad((total, normed), leaves, (of_sum, of_norm))
    return total.detach(), normed.detach(), *gradients


def _gate_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [_normal(shape, dtype), _normal((shape[0], shape[1] // 2), dtype)]


def _gate(kernel: Any, inputs: Sequence[Tensor], activation: str) -> Sequence[Tensor]:
    x, upstream = inputs
    x = x.detach().requires_grad_()
    value = kernel(x, activation)
    return value.detach(), *torch.autograd.grad(value, x, upstream)


def _heads_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    turns = _normal((shape[1], shape[3] // 2), torch.float32)
    rows = torch.arange(shape[1]).expand(shape[0], -1).contiguous()
    return [_normal(shape, dtype), _normal((*shape, 1), dtype)[..., 0], torch.cat([turns.cos(), turns.sin()], -1), rows]


def _rotate(kernel: Any, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    heads, upstream, table, rows = inputs
    leaf = heads.detach().requires_grad_()
    values = heads.shape[2] // 3
    sizes = (heads.shape[2] - 2 * values, values, values)
    parts = kernel(leaf * 1, sizes, Angles(table, rows))
    gradients = torch.autograd.grad(parts, leaf, upstream.split(sizes, dim=2))
    return *(part.detach() for part in parts), *gradients


def _attention_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    rows, length, heads, size = shape
    second = length * 2 // 3
    ids = (torch.arange(length) >= second).long().expand(rows, length) + 1
    starts = torch.tensor([0, second, length]).expand(rows, 3)
    numbers = [_normal((rows, length, 3 * heads, size), dtype), _normal((heads, length, length), dtype)]
    numbers.append(_normal((1, *shape), dtype)[0])
    return [*numbers, ids.contiguous(), starts.contiguous(), torch.tensor(0x5DEECE66D1234567)]


def _attention(kernel: Any, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    heads, bias, upstream, ids, starts, key = inputs
    heads, bias = heads.detach().requires_grad_(), bias.detach().requires_grad_()
    number = heads.shape[2] // 3
    call = AttentionCall(Sequences(ids, starts), kernel.spec.dropout, bias, ProbabilityKeys(key, 0, number))
    context = kernel(*heads.split(number, 2), call)
    return context.detach(), *torch.autograd.grad(context, (heads, bias), upstream)


T5 = AttentionSpec(64, shares_rows=True, bias=True)
CASES = (
    Case("dropout", "torch", (16384, 768), _dropout_inputs, _dropout, is_exact=True, rival="compiled"),
    Case("dropout", "torch", (16384, 1024), _dropout_inputs, _dropout, is_exact=True, rival="compiled"),
    Case("cross_entropy", "chunked", (2048, 30592), _loss_inputs, _loss),
    Case("cross_entropy", "chunked", (1024, 50304), _loss_inputs, _loss),
    Case("add_norm", "torch", (16384, 768), _norm_inputs, _add_norm, spec=_norm_spec(norm_kernels.LAYER)),
    Case("add_norm", "torch", (16384, 1024), _norm_inputs, _add_norm, spec=_norm_spec(norm_kernels.LAYER)),
    Case("add_norm", "torch", (4096, 4096), _norm_inputs, _add_rms_norm, spec=_norm_spec(norm_kernels.RMS)),
    Case("bias_gelu", "torch", (16384, 4608), _gate_inputs, partial(_gate, activation="gelu"), spec=GATED),
    Case("bias_gelu", "torch", (8192, 11264), _gate_inputs, partial(_gate, activation="silu"), spec=GATED),
    Case("rotary", "torch", (16, 1024, 36, 64), _heads_inputs, _rotate),
    # `sdpa` is the row of `auto`; `reference` is the row that draws by key.
    Case("attention", "sdpa", (16, 512, 12, 64), _attention_inputs, _attention, spec=T5),
    Case("attention", "reference", (8, 512, 16, 64), _attention_inputs, _attention, spec=replace(T5, dropout=0.1)),
)


def measure_kernels(device: str, cases: Sequence[Case] = CASES, path: Path = FIGURES) -> Iterator[Table]:
    """Yield the checks and the times, and write the times of kernels that are right into the file."""
    dtypes = [dtype for dtype in DTYPES if dtype != torch.bfloat16 or torch.cuda.get_device_capability() >= (8, 0)]
    pairs = [(case, dtype) for case in cases for dtype in dtypes]
    checked = [check(case, dtype, device) for case, dtype in pairs]
    yield checks_table(checked)
    times = [time_of(case, dtype, device, microseconds) for case, dtype in pairs]
    yield times_table(times)
    right = [figure for figure, found in zip(times, checked, strict=True) if found.is_right]
    add_figures(right, path)


def kernel_of(case: Case, row: str, device: str, dtype: torch.dtype) -> Any:
    """Return what a row of the case's table makes, whether or not it thinks that it can run."""
    need = Need(case.spec(device, case.shape) if callable(case.spec) else case.spec, device, dtype)
    return next(entry for entry in OPERATIONS[case.operation] if entry.name == row).make(need)


def check(case: Case, dtype: torch.dtype, device: str) -> Checks:
    """Compare a kernel with torch's row in float64 on the CPU, with itself, and with its CUDA graph."""
    inputs = case.inputs(case.shape, dtype)
    there = [x.to(device) for x in inputs]
    kernel, plain = (kernel_of(case, row, device, dtype) for row in (ROW, case.torch_row))

    def run(function: Any) -> list[Tensor]:
        return [x.cpu() for x in case.run(function, [x.clone() for x in there])]

    found, again, of_torch = run(kernel), run(kernel), run(plain)
    on_cpu = kernel_of(case, case.torch_row, "cpu", dtype)
    if case.is_exact:
        exact = list(case.run(on_cpu, inputs))
        is_right = all(map(torch.equal, found, exact))
    else:
        exact = list(case.run(on_cpu, [x.double() if x.is_floating_point() else x for x in inputs]))
        rounding = FP32_ERROR if dtype == torch.float32 else torch.finfo(dtype).eps / 2
        is_right = all(
            _error(own, of) <= max(rounding, MORE * _error(torchs, of))
            for own, torchs, of in zip(found, of_torch, exact, strict=True)
        )
    error, torch_error = (max(map(_error, values, exact)) for values in (found, of_torch))
    in_graph = None if device == "cpu" else all(map(torch.equal, found, _replayed(case, kernel, there)))
    return Checks(case, dtype, is_right, error, torch_error, all(map(torch.equal, found, again)), in_graph)


def _error(found: Tensor, exact: Tensor) -> float:
    """Return the largest difference over the largest value; whole numbers have to be equal."""
    if not found.is_floating_point():
        return 0.0 if torch.equal(found, exact) else float("inf")
    return ((found.double() - exact.double()).abs().max() / exact.double().abs().max().clamp_min(1e-30)).item()


def _replayed(case: Case, kernel: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    static = [x.clone() for x in inputs]
    graph, results = _captured(partial(case.run, kernel, static))
    for target, source in zip(static, inputs, strict=True):
        target.copy_(source)
    graph.replay()
    return [x.cpu() for x in results]


def _captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a CUDA graph of a function, and what the function returned when it was captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()  # compiles, and allocates what stays
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def microseconds(function: Callable[[], object]) -> float:
    """Return the median time on the device of a replayed graph, each with an empty second-level cache.

    Without a graph, the time of small kernels is the time that the host takes to start them.
    """
    from triton.testing import do_bench

    graph, results = _captured(function)
    time_ms = float(do_bench(graph.replay, return_mode="median"))
    del results
    return 1e3 * time_ms


def time_of(case: Case, dtype: torch.dtype, device: str, timer: Timer) -> Figure:
    """Time the kernel and the row that `auto` takes without it, forward and backward."""
    import triton

    torch.compiler.reset()  # a compiled row that met other types and shapes would run without being compiled
    inputs = [x.to(device) for x in case.inputs(case.shape, dtype)]
    kernels = [kernel_of(case, row, device, dtype) for row in (ROW, case.rival or case.torch_row)]
    own, plain = (timer(partial(case.run, kernel, inputs)) for kernel in kernels)
    on_gpu = device != "cpu"
    capability = "{}.{}".format(*torch.cuda.get_device_capability()) if on_gpu else NOTHING
    return Figure(
        case.operation, ROW, capability, str(dtype).removeprefix("torch."), case.shape, round(own, 2), round(plain, 2),
        torch.__version__, triton.__version__, torch.cuda.get_device_name() if on_gpu else "CPU",
    )  # fmt: skip


def add_figures(found: Sequence[Figure], path: Path) -> None:
    """Write figures into the file in place of those of the same operation, row, capability, type and shape."""
    known = {(*figure[:4], tuple(figure.shape)): figure for figure in (*measured(path), *found)}
    lines = [json.dumps(figure._asdict()) for _, figure in sorted(known.items())]
    write_text(path, "[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n")
    measured.cache_clear()


def checks_table(found: Sequence[Checks]) -> Table:
    """Return the table of the checks."""
    header = ("", "shape", "type", "right", "error", "of torch", "equal twice", "equal in a graph")
    answers = {True: "yes", False: "NO", None: NOTHING}
    rows = [
        [
            *_names(one.case.operation, one.case.shape, str(one.dtype)), answers[one.is_right],
            f"{one.error:.1e}", f"{one.torch_error:.1e}", answers[one.repeats], answers[one.in_graph],
        ]
        for one in found
    ]  # fmt: skip
    return Table("Triton kernels against float64 on the CPU", header, rows)


def times_table(found: Sequence[Figure]) -> Table:
    """Return the table of the times."""
    header = ("", "shape", "type", "us", "torch us", "torch / triton")
    rows = [
        [
            *_names(one.operation, one.shape, one.dtype), f"{one.microseconds:,.1f}",
            f"{one.torch_microseconds:,.1f}", f"{one.torch_microseconds / one.microseconds:.2f}",
        ]
        for one in found
    ]  # fmt: skip
    return Table(f"forward and backward, {found[0].card}" if found else "no kernels", header, rows)


def _names(operation: str, shape: Sequence[int], dtype: str) -> list[str]:
    return [operation, " x ".join(map(str, shape)), dtype.removeprefix("torch.")]
