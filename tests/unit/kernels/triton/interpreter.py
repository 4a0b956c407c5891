"""Tests in a process in which numpy computes Triton's kernels: TRITON_INTERPRET is read when the kernels are imported.

Two faults of the interpreter (3.7.1 to 3.9.0) are worked around: it cuts fp32 to bf16 where devices round to the
nearest even number, and its product of bf16 matrices multiplies the bit patterns as integers.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import numpy as np

VARIABLE = "TRITON_INTERPRET"


def in_interpreter(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test of a module's top level in the interpreter's process."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        if os.environ.get(VARIABLE) == "1":
            test(*arguments, **named)
        else:
            _pool().submit(_run, test.__module__, test.__name__, arguments, named).result()

    return run


@cache
def _pool() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare)
    with _interpreting():
        pool.submit(os.getpid).result()
    return pool


@contextmanager
def _interpreting() -> Iterator[None]:
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def _run(module: str, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    from importlib import import_module

    getattr(import_module(module), name)(*arguments, **named)


def _prepare() -> None:
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    torch.set_num_threads(1)
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
