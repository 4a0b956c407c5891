"""The time of a profiled step by class of kernel, and the time in which no kernel runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tools.benchmark.tables import NOTHING, Table

CLASSES: Mapping[str, tuple[str, ...]] = {
    "communication": ("nccl",),
    "cross entropy": ("nll_loss", "cross_entropy", "logsoftmax", "log_softmax"),
    "layer norm": ("layer_norm", "layernorm", "gammabeta", "rms_norm", "add_norm"),
    "optimizer": ("multi_tensor", "adam", "foreach", "lamb_"),
    "attention": (
        "flash", "fmha", "attention", "softmax", "sdpa", "cudnn::fusion",
        "context_kernel", "query_kernel", "key_value_kernel", "bias_kernel",
    ),
    "matrix products": ("gemm", "cutlass", "cublas", "nvjet", "matmul", "xmma", "splitk"),
    "embedding and indexing": ("embedding", "index", "gather", "scatter", "sort", "radix", "scan"),
    "copies": ("memcpy", "memset", "copy", "cat"),
    "reductions": ("reduce",),
    "elementwise and others": ("",),
}  # fmt: skip
"""Parts of a kernel's name in lower case; the first class with one of them counts."""


class Kernel(NamedTuple):
    """One run of a kernel, in microseconds."""

    name: str
    start: float
    end: float


def class_of(name: str) -> str:
    """Return the class of a kernel."""
    return next(kind for kind, parts in CLASSES.items() if any(part in name.lower() for part in parts))


def time_by_class(kernels: Iterable[Kernel], step_us: float) -> Table:
    """Return the table of a step that took `step_us`."""
    spent: dict[str, list[float]] = defaultdict(list)
    idle_us, until = step_us, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        spent[class_of(kernel.name)].append(kernel.end - kernel.start)
        idle_us -= max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    figures = [(kind, sum(times), f"{len(times):,}") for kind, times in spent.items()]
    figures = [*sorted(figures, key=lambda row: -row[1]), ("no kernel runs", idle_us, NOTHING)]
    rows = [(kind, f"{us / 1e3:.2f}", f"{100 * us / step_us:.1f} %", launches) for kind, us, launches in figures]
    return Table(f"one step of {step_us / 1e3:.1f} ms by class of kernel", ("", "ms", "share", "launches"), rows)
