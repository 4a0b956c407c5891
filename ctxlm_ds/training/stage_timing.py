"""Seconds that each layer takes forward and backward here, for cutting a pipeline by time.

The first pipeline rank of the first replica (with its tensor-parallel neighbours) runs a micro-batch of the training's
shape through one layer of each kind; every rank gets its figures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

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
    """Return the median seconds of each layer's forward and backward pass, the same list on every rank.

    `fields` are those of a micro-batch of the training's shape.
    """
    measures = topology.pipeline_parallel_rank == 0 and topology.data_parallel_rank == 0

    def measure() -> list[float]:
        return _measure(config, descriptions, fields, torch.device(device_type())) if measures else []

    return topology.broadcast_object(topology.run_together(measure))


def _measure(
    config: RunConfig, descriptions: Sequence[LayerDescription], fields: Mapping[str, Tensor], device: torch.device
) -> list[float]:
    """Time one layer of each kind, in the order in which they run."""
    dtype = DTYPES[config.training.precision]
    tensors = {name: field.to(device) for name, field in fields.items()}
    tied: dict[str, nn.Module] = {}
    timed: list[tuple[LayerDescription, float]] = []
    costs: list[float] = []
    for description in descriptions:
        seconds = next((cost for other, cost in timed if description.computes_like(other)), None)
        if seconds is None:
            module = tied.get(description.tie_key or "") or _build(description, device, dtype)
            if description.tie_key:
                tied[description.tie_key] = module
            seconds = _time_layer(description, module, tensors)
            timed.append((description, seconds))
        costs.append(seconds)
    return costs


def _build(description: LayerDescription, device: torch.device, dtype: torch.dtype) -> nn.Module:
    module = description.build().to(device=device, dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.01)
    return module


def _time_layer(description: LayerDescription, module: nn.Module, tensors: dict[str, Tensor]) -> float:
    """Time a layer and leave what it writes in `tensors`."""
    device = next(iter(tensors.values())).device
    seconds = []
    for _ in range(REPEATS + 1):
        given = [tensors[name].detach() for name in description.reads]
        inputs = [x.requires_grad_(x.is_floating_point()) for x in given]
        _synchronize(device)
        started_s = time.perf_counter()
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
    tensors.update(zip(description.writes, outputs, strict=True))
    return statistics.median(seconds[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
