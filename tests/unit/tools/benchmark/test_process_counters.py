"""Calls of CUDA's runtime by name, and the process's memory and faults."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from torch.autograd import DeviceType

from tools.benchmark.process_counters import MARK, DeviceCalls, calls_among, cpu_page_faults, peak_bytes, recorded_step


def test_calls_are_counted_by_name() -> None:
    """Names as torch's profiler writes them, with operations and kernels between them."""
    names = [
        "aten::mm", "cudaLaunchKernel", "void gemm_kernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cudaGraphLaunch",
        "cudaMemcpyAsync", "cudaStreamSynchronize", "cudaMemcpy", "cudaEventSynchronize", "cudaEventRecord",
        "cudaDeviceSynchronize", "cudaFuncGetAttributes", "cutlass_80_tensorop",
    ]  # fmt: skip
    assert calls_among(names) == DeviceCalls(launches=4, synchronisations=4)


def test_a_recorded_step() -> None:
    """The step lasts until its last kernel ends; what the recorder calls after it does not count."""

    def event(name: str, start: float, end: float, device: DeviceType = DeviceType.CPU) -> SimpleNamespace:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=device)

    def named(name: str, start: float, end: float) -> SimpleNamespace:
        """The time on the device of a part of the program that torch names."""
        return SimpleNamespace(**vars(event(name, start, end, DeviceType.CUDA)), is_user_annotation=True)

    step = recorded_step(
        [
            event("cudaLaunchKernel", 5.0, 6.0),
            event(MARK, 10.0, 50.0),
            event(MARK, 10.0, 90.0, DeviceType.CUDA),
            event("cudaLaunchKernel", 20.0, 21.0),
            named("Optimizer.step#AdamW.step", 40.0, 90.0),
            event("sm90_gemm", 40.0, 110.0, DeviceType.CUDA),
            event("cudaDeviceSynchronize", 51.0, 110.0),
        ]
    )
    assert step.calls == DeviceCalls(launches=1, synchronisations=0)
    assert step.kernels.title.startswith("one step of 0.1 ms")
    assert step.kernels.rows == [("matrix products", "0.07", "70.0 %", "1"), ("no kernel runs", "0.03", "30.0 %", "-")]


def test_memory_and_faults_grow() -> None:
    faults, size = cpu_page_faults(), 64 << 20
    block = np.ones(size, dtype=np.uint8)
    assert cpu_page_faults() > faults
    assert peak_bytes() > block.nbytes
