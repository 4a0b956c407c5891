"""Seconds that each layer takes forward and backward here, for cutting a pipeline by time.

The first pipeline rank of the first replica (with its tensor-parallel neighbours) runs a micro-batch of the training's
shape through each kind of layer; every rank gets its figures. Blocks are alike, so one of them is run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ctxlm_ds.data.stream.collate import prediction_slots
from ctxlm_ds.models.layer_list import LayerDescription, Tensors
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.training.runtime import device_type

REPEATS = 5
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def measured_costs(config: RunConfig, descriptions: Sequence[LayerDescription], topology: Topology) -> list[float]:
    """Median seconds of each layer's forward and backward pass, the same list on every rank."""
    measures = topology.pipeline_parallel_rank == 0 and topology.data_parallel_rank == 0

    def measure() -> list[float]:
        return _measure(config, descriptions, torch.device(device_type())) if measures else []

    return topology.broadcast_object(topology.run_together(measure))


def _measure(config: RunConfig, descriptions: Sequence[LayerDescription], device: torch.device) -> list[float]:
    tensors = synthetic_inputs(config, device)
    tied: dict[str, nn.Module] = {}
    costs: list[float] = []
    block_seconds: float | None = None
    for description in descriptions:
        if description.block and block_seconds is not None:
            costs.append(block_seconds)
            continue
        module = tied.get(description.tie_key or "") or _build(description, device, DTYPES[config.training.precision])
        if description.tie_key:
            tied[description.tie_key] = module
        seconds, tensors = _time_layer(description, module, tensors)
        costs.append(seconds)
        if description.block:
            block_seconds = seconds
    return costs


def synthetic_inputs(config: RunConfig, device: torch.device) -> Tensors:
    """What the first layer takes for one micro-batch of full rows: Batch.model_inputs()."""
    rows, length = config.training.micro_batch_size, config.data.seq_length
    sequences = config.data.sequences_per_row
    starts = torch.full((rows, sequences + 1), length, device=device)
    starts[:, 0] = 0

    def zeros(columns: int) -> torch.Tensor:
        return torch.zeros(rows, columns, dtype=torch.int64, device=device)

    positions = torch.arange(length, device=device).expand(rows, length).contiguous()
    slots = prediction_slots(config.data, config.objective)
    ones = torch.ones_like(positions)
    return zeros(length), zeros(length), positions, ones, starts, zeros(slots), zeros(sequences)


def _build(description: LayerDescription, device: torch.device, dtype: torch.dtype) -> nn.Module:
    module = description.build().to(device=device, dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.01)
    return module


def _time_layer(description: LayerDescription, module: nn.Module, tensors: Tensors) -> tuple[float, Tensors]:
    seconds = []
    outputs: Tensors = ()
    for _ in range(REPEATS + 1):
        inputs = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in tensors)
        _synchronize(inputs[0].device)
        started_s = time.perf_counter()
        if description.recompute:
            outputs = checkpoint(module, inputs, use_reentrant=False, **description.call_kwargs)
        else:
            outputs = module(inputs, **description.call_kwargs)
        floating = [output for output in outputs if output.is_floating_point() and output.requires_grad]
        torch.autograd.backward(floating, [torch.ones_like(output) for output in floating])
        _synchronize(inputs[0].device)
        seconds.append(time.perf_counter() - started_s)
    module.zero_grad(set_to_none=True)
    return statistics.median(seconds[1:]), outputs


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
