"""Tests in a process in which numpy computes Triton's kernels: TRITON_INTERPRET is read when the kernels are imported.

Two faults of the interpreter (3.7.1 to 3.9.0) are worked around: it cuts fp32 to bf16 where devices round to the
nearest even number, and its product of bf16 matrices multiplies the bit patterns as integers.
"""

from __future__ import annotations

import atexit
import os
import pickle
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy as np

VARIABLE = "TRITON_INTERPRET"
ROOT = Path(__file__).resolve().parents[4]
SIZE = struct.Struct("<q")


def in_interpreter(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test of a module's top level in the interpreter's process."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        if os.environ.get(VARIABLE) == "1":
            test(*arguments, **named)
            return
        server = _server()
        _send(server.stdin, (test.__module__, test.__name__, arguments, named))
        if (failure := _receive(server.stdout)) is not None:
            raise AssertionError(failure)

    return run


@cache
def _server() -> subprocess.Popen[bytes]:
    """Start the process, which ends with this one; a fork of this one knows nothing of it, as of a pool's."""
    command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, VARIABLE: "1"}
    )
    atexit.register(server.kill)
    return server


def serve() -> None:
    """Run the tests that arrive, and answer with None or a traceback."""
    answers, sys.stdout = os.fdopen(os.dup(1), "wb"), sys.stderr
    _prepare()
    while (asked := _receive(sys.stdin.buffer)) is not None:
        module, name, arguments, named = asked
        try:
            getattr(import_module(module), name)(*arguments, **named)
            _send(answers, None)
        except BaseException:
            _send(answers, traceback.format_exc())


def _send(pipe: IO[bytes] | None, value: object) -> None:
    assert pipe is not None
    content = pickle.dumps(value)
    pipe.write(SIZE.pack(len(content)) + content)
    pipe.flush()


def _receive(pipe: IO[bytes] | None) -> Any:
    """Return the next value, or None after the last."""
    assert pipe is not None
    size = pipe.read(SIZE.size)
    return pickle.loads(pipe.read(SIZE.unpack(size)[0])) if size else None


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
