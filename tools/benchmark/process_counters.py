"""Counters of the running process: peak memory, page faults, launches and synchronisations of a GPU."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.benchmark.kernel_classes import Kernel, time_by_class
from tools.benchmark.tables import Table

MARK = "benchmark step"
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch")
SYNCHRONISATIONS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""CUDA's runtime calls that wait; `cudaMemcpyAsync` does not, and a copy to the host is followed by one of these."""


class DeviceCalls(NamedTuple):
    """Calls of the host in one step."""

    launches: int
    """Kernels, or graphs of kernels."""
    synchronisations: int
    """Times that the host waits for the device."""


def cpu_page_faults() -> int:
    """Return the page faults of this process since its start."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def peak_bytes() -> int:
    """Return the most memory that this process had: of the GPU if there is one, else resident memory."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    # Not ru_maxrss, which begins with the memory of the process that started this one.
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


def calls_among(names: Iterable[str]) -> DeviceCalls:
    """Count the recorded calls of CUDA's runtime by name."""
    calls = [name for name in names if name.startswith("cu")]
    launches = sum(name.startswith(LAUNCHES) for name in calls)
    return DeviceCalls(launches, sum(name in SYNCHRONISATIONS for name in calls))


class RecordedStep(NamedTuple):
    """A step as torch's profiler saw it."""

    calls: DeviceCalls
    kernels: Table
    """Time by class of kernel."""


class StepRecorder:
    """Record a step from now until `stop`."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile, record_function

        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)
        self._mark = record_function(MARK)
        self._profile.__enter__()
        self._mark.__enter__()

    def stop(self) -> RecordedStep:
        """Return the step; calls of the recorder, which are after its end, do not count."""
        import torch

        self._mark.__exit__(None, None, None)
        torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        return recorded_step(list(self._profile.events()))


def _is_mark(event: Any) -> bool:
    """Return whether an event of the device is the time of a named part of the program, not of a kernel."""
    return event.name == MARK or getattr(event, "is_user_annotation", False)


def recorded_step(events: Sequence[Any]) -> RecordedStep:
    """Return what a profiler's events say of the marked step; it lasts until its last kernel ends."""
    from torch.autograd import DeviceType

    host = next(e.time_range for e in events if e.name == MARK and e.device_type == DeviceType.CPU)
    calls = (e.name for e in events if e.device_type == DeviceType.CPU and host.start <= e.time_range.start <= host.end)
    kernels = [
        Kernel(e.name, e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type == DeviceType.CUDA and not _is_mark(e) and e.time_range.start >= host.start
    ]
    end = max([host.end, *(kernel.end for kernel in kernels)])
    return RecordedStep(calls_among(calls), time_by_class(kernels, end - host.start))
