"""Model FLOPs utilization (MFU): the operations that the model needs over those that the devices could do.

The count is the planner's (training/measure.py): matrix products forward and backward, without recomputation and
without positions that a causal model does not see (PaLM, Appendix B, which counts all pairs of positions).
"""

from __future__ import annotations

from collections.abc import Callable

from ctxlm_ds.recipe.hardware import GPUS, TERA

NAMES = {
    "H200": ("NVIDIA H200",),
    "H100": ("NVIDIA H100 80GB HBM3",),
    "A100-80": ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
    "A100-40": ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
    "V100-32": ("Tesla V100-SXM2-32GB", "Tesla V100-SXM2-16GB"),
}
"""GPUs of recipe/hardware.py by the names that CUDA gives them; PCIe models are listed if they have the same peak."""


def peak_row_seconds(
    peak_tflops: float | None, precision: str, world_size: int, row_flops: Callable[[], float]
) -> float | None:
    """Return the seconds of a row if all devices computed at their peak; None if the peak is unknown.

    The run's rows per second times this is the MFU. `row_flops` counts a row; it is not called without a peak.
    """
    tflops = peak_tflops or device_peak_tflops(precision)
    if tflops is None:
        return None
    return row_flops() / (TERA * tflops * world_size)


def device_peak_tflops(precision: str) -> float | None:
    """Return the published dense peak of this process's GPU in a precision; None for others and for CPUs."""
    import torch

    if not torch.cuda.is_available():
        return None
    return published_peak_tflops(torch.cuda.get_device_name(), precision)


def published_peak_tflops(device_name: str, precision: str) -> float | None:
    """Return the dense peak of a GPU by CUDA's name of it, 1e12 operations per second; None if it is not listed."""
    kind = next((kind for kind, names in NAMES.items() if device_name in names), None)
    return next((gpu.flops_per_s(precision) / TERA for gpu in GPUS if gpu.name == kind), None)
