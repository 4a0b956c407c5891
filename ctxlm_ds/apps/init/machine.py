"""The machine that a new recipe is for: its GPUs as the planner describes them, or CPU cores and their speed."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, replace

from ctxlm_ds.console import counted
from ctxlm_ds.recipe.hardware import GIB, GPUS, Gpu

_MATRIX_SIZE = 512
_MEASURED_S = 1.0
_CPU_SHARE = 0.5
"""Share of a large product's speed that a training step reaches on CPU cores."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices of a run, one rank each."""

    ranks: int
    gpu: Gpu | None = None
    """None: CPU cores."""
    cpu_flops_per_s: float = 0.0
    """fp32 operations per second that training reaches on all cores; only without a GPU."""
    memory_bytes: float = 0.0
    """Host memory; only without a GPU."""

    @property
    def precision(self) -> str:
        """bf16 if the GPU has it, else fp16; fp32 on CPUs."""
        if self.gpu is None:
            return "fp32"
        return "bf16" if self.gpu.has_bf16 else "fp16"

    def __str__(self) -> str:
        if self.gpu is None:
            return f"{counted(self.ranks, 'CPU rank')}, {os.cpu_count()} cores"
        return f"{self.ranks} x {self.gpu.name} ({self.gpu.memory_gib:.0f} GiB)"


def find_machine(ranks: int | None = None) -> Machine:
    """Return this machine with a number of ranks; by default one per GPU, or one if there is no GPU."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu = describe_gpu(properties.name, properties.total_memory / GIB, properties.major >= 8)
        return Machine(ranks or torch.cuda.device_count(), gpu)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(ranks or 1, None, _measure_cpu() * _CPU_SHARE, float(memory))


def describe_gpu(name: str, memory_gib: float, has_bf16: bool) -> Gpu:
    """Return the planner's entry for a GPU; if its name is unknown, the entry nearest in memory under that name."""
    able = [gpu for gpu in GPUS if gpu.has_bf16 == has_bf16]
    same = [gpu for gpu in able if gpu.name.partition("-")[0].lower() in name.lower()]
    nearest = min(same or able, key=lambda gpu: abs(gpu.memory_gib - memory_gib))
    return replace(nearest, name=nearest.name if same else name, memory_gib=memory_gib)


def _measure_cpu() -> float:
    """Return the fp32 operations per second of the fastest of several matrix products on all threads."""
    import torch

    left, right = torch.rand(2, _MATRIX_SIZE, _MATRIX_SIZE)
    left @ right
    end, fastest_s = time.monotonic() + _MEASURED_S, math.inf
    while time.monotonic() < end:
        start = time.monotonic()
        left @ right
        fastest_s = min(fastest_s, time.monotonic() - start)
    return 2.0 * _MATRIX_SIZE**3 / fastest_s
