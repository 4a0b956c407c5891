"""Measured seconds of each layer, for cutting a pipeline by time.

The first pipeline rank of the first replica (with its tensor-parallel ranks) runs one layer of each kind; every rank
gets its measurements.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ctxlm_ds.kernels.dispatch import DTYPES
from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.training.runtime import device_type

REPEATS = 5


def measured_costs(
    config: RunConfig, descriptions: Sequence[LayerDescription], fields: Mapping[str, Tensor], topology: Topology
) -> list[float]:
    """Return the median seconds of each layer's forward and backward pass on a micro-batch, the same on every rank."""

    def measure() -> list[float]:
        measures = topology.pipeline_parallel_rank == 0 and topology.data_parallel_rank == 0
        return _measure(config, descriptions, fields) if measures else []

    return topology.broadcast_object(topology.run_together(measure))


def _measure(config: RunConfig, descriptions: Sequence[LayerDescription], fields: Mapping[str, Tensor]) -> list[float]:
    """Time one layer of each kind, in the order in which they run."""
    device, dtype = torch.device(device_type()), DTYPES[config.training.precision]
    tensors = {name: field.to(device) for name, field in fields.items()}
    tied: dict[str, nn.Module] = {}
    timed: list[_Timed] = []
    costs: list[float] = []
    for description in descriptions:
        inputs = [None if name in description.carries else tensors[name] for name in description.reads]
        shapes = [None if x is None else (x.shape, x.dtype) for x in inputs]
        same = next((t for t in timed if t.shapes == shapes and description.computes_like(t.description)), None)
        if same is None:
            module = tied.get(description.tie_key or "")
            if module is None:
                module = description.build().to(device, dtype)
                for parameter in module.parameters():
                    parameter.data.fill_(0.01)
            if description.tie_key:
                tied[description.tie_key] = module
            same = _Timed(description, shapes, *_time_layer(description, module, inputs))
            timed.append(same)
        tensors.update(zip(description.writes, same.outputs, strict=True))
        costs.append(same.seconds)
    return costs


@dataclass(frozen=True)
class _Timed:
    """The measurement of a layer, reused for layers that compute the same."""

    description: LayerDescription
    shapes: list[Any]
    """Shape and type of each input."""
    seconds: float
    outputs: tuple[Tensor, ...]


def _time_layer(
    description: LayerDescription, module: nn.Module, tensors: Sequence[Tensor | None]
) -> tuple[float, tuple[Tensor, ...]]:
    """Return the median seconds of a layer, and its outputs."""
    device = next(x.device for x in tensors if x is not None)
    seconds = []
    for _ in range(REPEATS + 1):
        given = [None if x is None else x.detach() for x in tensors]
        inputs = [x if x is None else x.requires_grad_(x.is_floating_point()) for x in given]
        _synchronize(device)
        started_s = time.perf_counter()
        with torch.set_grad_enabled(not description.frozen):
            if description.recompute:
                written = checkpoint(module, *inputs, use_reentrant=False, **description.call_kwargs)
            else:
                written = module(*inputs, **description.call_kwargs)
        outputs = written if isinstance(written, tuple) else (written,)
        floating = [output for output in outputs if output.is_floating_point() and output.requires_grad]
        if floating:
            torch.autograd.backward(floating, [torch.ones_like(output) for output in floating])
        _synchronize(device)
        seconds.append(time.perf_counter() - started_s)
    module.zero_grad(set_to_none=True)
    return statistics.median(seconds[1:]), outputs


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
