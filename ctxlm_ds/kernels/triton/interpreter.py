"""Triton's interpreter, in which numpy computes the kernels of a process with TRITON_INTERPRET=1, without its faults.

Versions 3.7.1 to 3.9.0 cut fp32 to bf16 where devices round to the nearest even number, and multiply the bit patterns
of bf16 matrices as integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def round_as_devices() -> None:
    """Replace the interpreter's conversions of bf16 and its products of bf16 matrices for the rest of the process."""
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
