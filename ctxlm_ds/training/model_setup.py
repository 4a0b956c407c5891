"""The model an engine is made of, and DeepSpeed's settings as the engine needs them.

In: layer descriptions, the recipe, the topology. Out: a module whose weights are unset, settings.
Not here: pipeline stages (pipeline.py), values (models/initialize.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ctxlm_ds.models.layers import LayerDescription, LayerSequence
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.parameters import ParameterFacts
from ctxlm_ds.parallel.placement import shard_of
from ctxlm_ds.parallel.random import DropoutStreams
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.recipe.deepspeed import NEVER_PRINT_STEPS
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.training.fragments import Holding
from ctxlm_ds.training.nvme import prepare_folders
from ctxlm_ds.training.runtime import load_async_io

DescribeLayers = Callable[[ParallelContext], list[LayerDescription]]
"""Lists a model's layers for a rank's share of them (models/build.py)."""


def parallel_context(config: RunConfig, topology: Topology) -> ParallelContext:
    """This rank's share of every layer."""
    layout = config.parallel
    streams = DropoutStreams(
        config.training.seed, topology.tensor_parallel_rank, topology.tensor_parallel_size, enabled=config.model.drops
    )
    return ParallelContext(
        size=topology.tensor_parallel_size,
        rank=topology.tensor_parallel_rank,
        group=topology.tensor_group,
        sequence_parallel=layout.sequence_parallel,
        vocab_multiple=layout.vocab_multiple,
        dropout=streams,
    )


def build_whole_model(
    descriptions: Sequence[LayerDescription],
    outputs: Sequence[str],
    streams: DropoutStreams,
    deepspeed_config: dict[str, Any],
    zero_stage: int,
    mpu: Any,
) -> LayerSequence:
    """The model of a layout without a pipeline; under stage 3 each layer is partitioned as soon as it is made."""
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if zero_stage == 3:
        import deepspeed

        group = None if mpu is None else mpu.get_data_parallel_group()
        context = deepspeed.zero.Init(config_dict_or_path=deepspeed_config, data_parallel_group=group, mpu=mpu)
    with context:
        return LayerSequence(descriptions, outputs, streams)


def engine_settings(deepspeed_config: dict[str, Any], zero_stage: int, is_pipeline: bool) -> dict[str, Any]:
    """The configuration for deepspeed.initialize: what would break the engine's promises is settled here."""
    settings = dict(deepspeed_config)
    if settings.get("bf16", {}).get("enabled"):
        # A run stops at a NaN; without this DeepSpeed applies it under stage 2.
        settings["bf16"] = {**settings["bf16"], "check_grad_overflow": True}
    if zero_stage == 0:
        # DeepSpeed's fp32 path reports no norm, and under a pipeline counts the wrong parameters; the engine clips.
        settings["gradient_clipping"] = 0.0
    if is_pipeline:
        # DeepSpeed's halving of what crosses stages takes tensor-parallel ranks to hold equal tensors.
        unpartitioned = {"pipe_partitioned": False, "grad_partitioned": False}
        settings["pipeline"] = {**settings.get("pipeline", {}), **unpartitioned}
        # It would be switched off with a warning from every rank.
        settings["zero_optimization"] = {**settings.get("zero_optimization", {}), "overlap_comm": False}
        if settings.get("steps_per_print") == NEVER_PRINT_STEPS:
            # It prints at every multiple, 0 among them.
            settings["steps_per_print"] = None
    return settings


def holding_of(
    parallel: ParallelContext, name: str, facts: ParameterFacts, shape: Sequence[int], parameter: torch.nn.Parameter
) -> Holding:
    """Describe what this rank's model holds of one parameter of the whole `shape`."""
    shard = shard_of(name, facts.split, shape, parallel.size, parallel.rank, parallel.vocab_multiple)
    return Holding(
        shard,
        tensor_duplicate=parallel.rank > 0 and facts.split is None,
        stage_duplicate=getattr(parameter, "ds_pipe_replicated", False),
    )


def write_frozen(
    parallel: ParallelContext, name: str, facts: ParameterFacts, value: torch.Tensor, parameter: torch.nn.Parameter
) -> None:
    """Write this rank's share of a whole value into a parameter that no optimizer holds; ZeRO-3 keeps it in pieces."""
    shard = shard_of(name, facts.split, value.shape, parallel.size, parallel.rank, parallel.vocab_multiple)
    with gathered(parameter), torch.no_grad():
        parameter.view(-1)[: shard.num_elements].copy_(shard.extract(value))


def gathered(parameter: torch.nn.Parameter) -> contextlib.AbstractContextManager[Any]:
    """Hold a parameter whole, which ZeRO-3 keeps in pieces; what is written to it stays."""
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)


def sum_over_sharers(
    topology: Topology, zero_stage: int, device: torch.device
) -> Callable[[torch.Tensor], None] | None:
    """Return what adds a tensor over the ranks that share this stage's parameters; None if no two do.

    With ZeRO stage 0 only tensor-parallel ranks share parameters.
    """
    sharers = topology.tensor_parallel_size * (1 if zero_stage == 0 else topology.data_parallel_size)
    if sharers == 1:
        return None
    group = topology.tensor_group if zero_stage == 0 else topology.replica_group

    def add(tensor: torch.Tensor) -> None:
        # Offloaded weights are in CPU memory, from which nccl cannot add.
        moved = tensor.to(device)
        torch.distributed.all_reduce(moved, group=group)
        tensor.copy_(moved)

    return add


def prepare_nvme(deepspeed_config: dict[str, Any]) -> None:
    """Make the folders of an NVMe offload and load DeepSpeed's operator for it, if the settings ask for one."""
    if prepare_folders(deepspeed_config):
        load_async_io()
