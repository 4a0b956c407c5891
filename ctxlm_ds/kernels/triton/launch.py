"""Launches of the Triton kernels: every kernel starts here, as part of an operator of torch.

The function of an operator serves three ends. On a device it allocates the results and launches; with fake or meta
tensors it only allocates, so that it is its own fake form; inside `recorded` the launches are kept, from which
machine_code.py compiles the kernels for a GPU that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ctxlm_ds.kernels.implementation import tag_compiled_code

tag_compiled_code()
LIBRARY = torch.library.Library("ctxlm", "FRAGMENT")
INTERPRETED: bool = triton.knobs.runtime.interpret
"""TRITON_INTERPRET=1: numpy computes the kernels, on tensors of the CPU."""
Grid = tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its arguments by name, of which tensors may be fake."""

    kernel: Any
    grid: Grid
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int
    """Steps of a loop that memory holds together."""


_records: list[list[Launch]] = []


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Keep the launches of operators inside this context."""
    _records.append([])
    try:
        yield _records[-1]
    finally:
        _records.pop()


def launch(kernel: Any, grid: Grid, *arguments: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
    """Launch a kernel with its `arguments` in order, then the compile-time constants; fake tensors start nothing."""
    for records in _records:
        named = dict(zip(kernel.arg_names, arguments, strict=False))
        records.append(Launch(kernel, grid, {**named, **constants}, num_warps, num_stages))
    first = arguments[0]
    if not isinstance(first, FakeTensor) and first.device.type != "meta":
        kernel[grid](*arguments, **constants, num_warps=num_warps, num_stages=num_stages)


def operator(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a function that calls `launch` as an operator; return the operator.

    `schema` has name, arguments and results in torch's notation, such as `double(Tensor x) -> Tensor`.
    """

    def register(function: Callable[..., Any]) -> Any:
        name = schema.partition("(")[0]
        LIBRARY.define(schema)
        LIBRARY.impl(name, function, "CUDA")
        if INTERPRETED:
            LIBRARY.impl(name, function, "CPU")
        torch.library.register_fake(f"ctxlm::{name}", function, lib=LIBRARY)
        return getattr(torch.ops.ctxlm, name).default

    return register


def differentiable(operator: Any, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Give an operator its gradient: forward(ctx, inputs, output) keeps what backward(ctx, *gradients) needs."""
    torch.library.register_autograd(operator, backward, setup_context=forward, lib=LIBRARY)


def dense(x: Tensor) -> Tensor:
    """Return x as the kernels read it: contiguous."""
    return x if x.is_contiguous() else x.contiguous()


def round_as_devices() -> None:
    """Correct the interpreter of a process with TRITON_INTERPRET=1 for the rest of the process.

    Versions 3.7.1 to 3.9.0 cut fp32 to bf16 where devices round to the nearest even number, and multiply the bit
    patterns of bf16 matrices as integers.
    """
    from triton.runtime import interpreter

    convert, create_dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounded(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if (source, target) == (tl.float32, tl.bfloat16):
            values = torch.from_numpy(np.frombuffer(data.tobytes(), np.float32).copy())
            return values.to(torch.bfloat16).view(torch.uint16).numpy().reshape(data.shape)
        if (source, target) == (tl.bfloat16, tl.float32):
            return (np.frombuffer(data.tobytes(), np.uint16).astype(np.uint32) << 16).reshape(data.shape)
        return convert(data, source, target, mode)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        wide = rounded(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    interpreter._convert_float = rounded
    interpreter.InterpreterBuilder.create_dot = dot
