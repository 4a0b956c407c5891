"""Parts of an engine's construction: the model without weights, its holdings, and DeepSpeed's settings."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.models.layers import LayerDescription, parameter_prefixes
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.parameters import ParameterFacts
from ctxlm_ds.parallel.placement import shard_of
from ctxlm_ds.parallel.random import DropoutStreams
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.recipe.json_source import NEVER_PRINT_STEPS
from ctxlm_ds.recipe.schema import ParallelConfig, TrainingConfig
from ctxlm_ds.training.engine.fragments import Holding


def parallel_context(layout: ParallelConfig, seed: int, drops: bool, topology: Topology) -> ParallelContext:
    """Return this rank's share of every layer."""
    streams = DropoutStreams(seed, topology.tensor_parallel_rank, topology.tensor_parallel_size, enabled=drops)
    return ParallelContext(
        size=topology.tensor_parallel_size,
        rank=topology.tensor_parallel_rank,
        group=topology.tensor_group,
        sequence_parallel=layout.sequence_parallel,
        vocab_multiple=layout.vocab_multiple,
        dropout=streams,
    )


def check_batch_ramp(training: TrainingConfig, family: str, layers: Sequence[LayerDescription]) -> None:
    """Raise ConfigError if the batch is to grow and a layer carries a state for each of its rows."""
    if training.batch_ramp is not None and any(layer.carries for layer in layers):
        raise ConfigError(
            f"training.batch_ramp is set, but model.family {family} carries a state from step to "
            "step for each row of the batch, so the batch cannot grow; set it to null"
        )


def engine_settings(deepspeed_config: dict[str, Any], zero_stage: int, is_pipeline: bool) -> dict[str, Any]:
    """Return the configuration for deepspeed.initialize, with the settings that exact steps need."""
    settings = dict(deepspeed_config)
    if settings.get("bf16", {}).get("enabled"):
        # Without this DeepSpeed applies NaN gradients under stage 2.
        settings["bf16"] = {**settings["bf16"], "check_grad_overflow": True}
        accumulates = settings.get("data_types", {}).get("grad_accum_dtype")
        if zero_stage == 1 and accumulates == "fp32" and settings.get("communication_data_type") is None:
            # DeepSpeed would round the fp32 sums to bf16, even on one rank.
            settings["communication_data_type"] = "fp32"
    if zero_stage == 0:
        # The engine clips: DeepSpeed's fp32 path reports no norm and counts wrong parameters under a pipeline.
        settings["gradient_clipping"] = 0.0
    if is_pipeline:
        # DeepSpeed's partitioning of activations assumes that tensor-parallel ranks hold equal tensors.
        unpartitioned = {"pipe_partitioned": False, "grad_partitioned": False}
        settings["pipeline"] = {**settings.get("pipeline", {}), **unpartitioned}
        # DeepSpeed would switch it off with a warning on every rank.
        settings["zero_optimization"] = {**settings.get("zero_optimization", {}), "overlap_comm": False}
        if settings.get("steps_per_print") == NEVER_PRINT_STEPS:
            # It prints at every multiple, including 0.
            settings["steps_per_print"] = None
    return settings


def holding_of(
    parallel: ParallelContext, name: str, facts: ParameterFacts, shape: Sequence[int], parameter: torch.nn.Parameter
) -> Holding:
    """Describe this rank's shard of one parameter of the full `shape`."""
    shard = shard_of(name, facts.split, shape, parallel.size, parallel.rank, parallel.vocab_multiple)
    return Holding(
        shard,
        tensor_duplicate=parallel.rank > 0 and facts.split is None,
        stage_duplicate=getattr(parameter, "ds_pipe_replicated", False),
    )


def write_frozen(
    parallel: ParallelContext, name: str, facts: ParameterFacts, value: torch.Tensor, parameter: torch.nn.Parameter
) -> None:
    """Write this rank's share of a full value into a parameter without an optimizer, also under ZeRO-3."""
    shard = shard_of(name, facts.split, value.shape, parallel.size, parallel.rank, parallel.vocab_multiple)
    with gathered(parameter), torch.no_grad():
        parameter.view(-1)[: shard.num_elements].copy_(shard.extract(value))


def keep_precision(frozen: Mapping[str, torch.nn.Parameter], descriptions: Sequence[LayerDescription]) -> None:
    """Give frozen parameters the data type of their layer again, after DeepSpeed has converted the model."""
    prefixes = parameter_prefixes(descriptions)
    own = {prefix: d.dtype for prefix, d in zip(prefixes, descriptions, strict=True) if d.dtype is not None}
    for name, parameter in frozen.items():
        dtype = next((own[prefix] for prefix in accumulate(name.split("."), "{}.{}".format) if prefix in own), None)
        if dtype is not None and parameter.dtype != dtype:
            assert not hasattr(parameter, "ds_id")  # recipe/layout.py refuses it under stage 3
            parameter.data = parameter.data.to(dtype)


def gathered(parameter: torch.nn.Parameter) -> contextlib.AbstractContextManager[Any]:
    """Gather a parameter that ZeRO-3 has partitioned; writes to it are kept."""
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
