"""DeepSpeed around an engine: process group, device, operators, ranks, settings, parameters that it does not step."""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch

from ctxlm_ds.errors import ConfigError, KernelError
from ctxlm_ds.kernels.implementation import why_compiled_cannot_run
from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.stages import layer_parameters
from ctxlm_ds.parallel.context import DropoutStreams, ParallelContext
from ctxlm_ds.parallel.parameters import ParameterFacts
from ctxlm_ds.parallel.placement import shard_of
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.process.launch import without_known_prints
from ctxlm_ds.process.patches import compile_at_first_call, replaced
from ctxlm_ds.recipe.deepspeed import NEVER_PRINT_STEPS
from ctxlm_ds.recipe.schema import ParallelConfig, RunConfig, TrainingConfig
from ctxlm_ds.training.engine.fragments import Holding
from ctxlm_ds.training.measure import describe, with_vocabulary
from ctxlm_ds.training.optimizers.base import AdamFactory

JOIN_TIMEOUT_S = 1800.0
"""Time for all ranks to join."""
WAIT_TIMEOUT_S = 30 * 24 * 3600.0
_TIMEOUT_VARIABLE = "DEEPSPEED_TIMEOUT"
"""Set by a user: minutes after which every collective fails."""


OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "size calculation overflowed")
"""Words of the allocators' plain RuntimeErrors."""
BYTES_PER_PARAMETER = 16
"""Weight, gradient, fp32 copy and moments."""


@contextmanager
def explain_out_of_memory(config: RunConfig) -> Iterator[None]:
    """Replace an allocator's error by a ConfigError that names the size of the model and what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        try:
            known = config.model_copy(update={"model": with_vocabulary(config.model)})
            count = sum(map(math.prod, describe(known).trained_shapes.values()))
            size = (
                f"The model has {count:,} parameters; weights, gradients and optimizer states take about "
                f"{count * BYTES_PER_PARAMETER / 1e9:,.0f} GB over all ranks, in addition to activations"
            )
        except RuntimeError:
            size = "The model is too large to be described"
        raise ConfigError(
            f"memory ran out. {size}. Choose a smaller model, micro-batch or another layout; "
            "ctxlm plan --config RECIPE --gpu NAME lists layouts that fit"
        ) from error


def init_process_group() -> None:
    """Join the process group of the launcher's variables (nccl or gloo); ConfigError if its port is in use."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.constants import default_pg_timeout

    timeout = default_pg_timeout if _TIMEOUT_VARIABLE in os.environ else timedelta(seconds=JOIN_TIMEOUT_S)
    # The shared-memory all-reduce is for inference; building it would take a minute at the first start on a CPU.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = get_accelerator().communication_backend_name()
    try:
        if device_type() == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            if not torch.distributed.is_initialized():
                # DeepSpeed would bind the device, and every further group would split the communicator of all ranks.
                # Without it, the members of a group make its communicator at first use.
                torch.distributed.init_process_group("nccl", timeout=timeout)
        deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=timeout)
        skip_sums_over_one_rank()
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"port {os.environ['MASTER_PORT']}, on which the ranks meet, is in use on this machine, probably by "
            "another run; start with another one: deepspeed --master_port PORT, or torchrun --standalone"
        ) from error


def skip_sums_over_one_rank() -> None:
    """Let DeepSpeed's all-reduce return immediately in a group of one rank.

    A step of ZeRO calls it once for each bucket and each group of parameters, and it takes a millisecond with gloo.
    """
    from deepspeed import comm

    all_reduce = comm.all_reduce
    if hasattr(all_reduce, "skips"):
        return

    @functools.wraps(all_reduce)
    def skipping(tensor: Any, *arguments: Any, group: Any = None, async_op: bool = False, **named: Any) -> Any:
        if not arguments and not async_op and comm.get_world_size(group) == 1:
            return None
        return all_reduce(tensor, *arguments, group=group, async_op=async_op, **named)

    skipping.skips = True  # type: ignore[attr-defined]
    comm.all_reduce = skipping


def leave_gradients_in_place(engine: Any) -> None:
    """Let DeepSpeed's engine of stage 0 on one rank not join fp32 gradients, multiply by 1 and copy each back."""
    if engine.communication_data_type == torch.float32 and engine.gradient_predivide_factor() == 1.0:
        engine._reduce_non_expert_gradients = lambda *_: None


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon, for which every ZeRO optimizer looks, and compile its functions only if they are called.

    Compiling imports inductor: 1.5 s of each rank's start, and 65 MB.
    """
    from deepspeed.runtime import compiler

    with replaced(compiler, "compile", lambda: compile_at_first_call):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


def leave_waiting_to_watchdog() -> None:
    """Remove the timeouts of this rank's process groups; the watchdog detects hangs.

    The defaults (10 minutes for NCCL, 30 for gloo) would end a job during a long save, the build of a sample index or
    a suspension, without saying which rank was late.
    """
    if _TIMEOUT_VARIABLE in os.environ:
        return
    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=WAIT_TIMEOUT_S), group)


def device_type() -> str:
    """Return `cuda` or `cpu`, as DeepSpeed's accelerator says."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().device_name().split(":")[0]


def check_precision(training: TrainingConfig, zero_stage: int | None = None) -> None:
    """Raise ConfigError if DeepSpeed does not support the data type on this device, or under this ZeRO stage."""
    if zero_stage == 0 and training.precision != "fp32":
        raise ConfigError(
            f"training.precision is {training.precision} with ZeRO stage 0, where DeepSpeed cannot "
            "accumulate gradients in fp32; use stage 1 (the same numbers, less memory) or precision fp32"
        )
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    supported = {"fp32": True, "bf16": accelerator.is_bf16_supported(), "fp16": accelerator.is_fp16_supported()}
    if not supported[training.precision]:
        raise ConfigError(
            f"training.precision is {training.precision}, which DeepSpeed does not support on this device "
            f"({accelerator.device_name()}); use bf16 or fp32"
        )


def compile_setting(training: TrainingConfig, parallel: ParallelConfig, zero_stage: int, device: str) -> bool | str:
    """Return how torch.compile compiles the repeated layers; ConfigError if reduce-overhead cannot run here.

    CUDA graphs reuse the memory of their outputs in the next micro-batch, and gradients are such outputs: only the bf16
    optimizer of stage 1 takes each one within the backward pass. A collective is not part of a graph, and stage 3 moves
    the weights.
    """
    if training.compile_mode == "default" or not training.compile:
        return training.compile
    problem = why_compiled_cannot_run(device)
    problems = {
        f"it needs bf16 and ZeRO stage 1, not {training.precision} and stage {zero_stage}": (
            training.precision != "bf16" or zero_stage != 1
        ),
        "it needs layers without tensor, context and pipeline parallelism": parallel.model_parallel_size > 1,
        "it does not go with activation_checkpointing": training.activation_checkpointing,
        f"it needs a GPU, and this run is on {device}": device == "cpu",
        str(problem): problem is not None,
    }
    for reason, applies in problems.items():
        if applies:
            raise ConfigError(
                f"training.compile_mode: `{training.compile_mode}` cannot run here: {reason}. Set it to `default`."
            )
    return training.compile_mode


def deepspeed_adam(offloaded: bool) -> AdamFactory:
    """Return DeepSpeed's CPUAdam (offloaded) or FusedAdam class, built once per machine, or raise KernelError."""
    _load_optimizer("Adam", offloaded, f"set kernels.optimizer: {'reference' if offloaded else 'auto or torch'}")
    from deepspeed.ops import adam

    return adam.DeepSpeedCPUAdam if offloaded else adam.FusedAdam


def load_described_optimizer(section: Mapping[str, Any], offloaded: bool) -> None:
    """Load the operator of the optimizer that a DeepSpeed JSON describes, if it has one, or raise KernelError."""
    kind = {"adamw": "Adam"}.get(section["type"].lower(), section["type"].capitalize())
    if kind == "Lion" or (kind == "Adam" and not section["params"].get("torch_adam")):
        remedy = "in the DeepSpeed JSON choose Adam with torch_adam: true, or set optimizer.name in the recipe"
        _load_optimizer(kind, offloaded, remedy)


def _load_optimizer(kind: str, offloaded: bool, remedy: str) -> None:
    name = f"{'CPU' if offloaded else 'Fused'}{kind}"
    _load(name, f"{name}Builder", remedy)


def _load(name: str, builder_name: str, remedy: str) -> None:
    """Load an operator, which is built without debug information: a third of the time of its compiler."""
    try:
        from deepspeed.ops import op_builder

        builder = getattr(op_builder, builder_name)()
        given = builder.cxx_args
        builder.cxx_args = lambda: [*given(), "-g0"]
        builder.load(verbose=False)
    except Exception as error:
        # A missing compiler, CUDA toolkit or header raises many kinds of exception, mostly plain ones.
        raise KernelError(f"DeepSpeed's {name} cannot be built here ({error}); {remedy}") from error


def load_async_io() -> None:
    """Load DeepSpeed's file access for NVMe offload, built once per machine; KernelError if it cannot be."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    remedy = "or offload to cpu instead of nvme in the DeepSpeed JSON"
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise KernelError(
            "NVMe offload needs libaio's headers, which are not installed; install them (Debian, Ubuntu: apt-get "
            f"install libaio-dev; Fedora, Red Hat: dnf install libaio-devel), {remedy}"
        )
    _load("async_io", AsyncIOBuilder.__name__, f"fix that, {remedy}")


def print_communication(deepspeed_config: Mapping[str, Any]) -> None:
    """Print DeepSpeed's table of collectives if its comms_logger is enabled; all ranks call it."""
    if deepspeed_config.get("comms_logger", {}).get("enabled"):
        import deepspeed

        deepspeed.comm.log_summary()


def pipeline_topology(topology: Topology) -> Any:
    """Return DeepSpeed's topology: pipe, data, model, the last one fastest, as in our Topology."""
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    return PipeModelDataParallelTopology(
        num_pp=topology.pipeline_parallel_size, num_mp=topology.tensor_parallel_size, num_dp=topology.replica_size
    )


def model_parallel_unit(topology: Topology) -> Any:
    """Return DeepSpeed's `mpu` for tensor parallelism without a pipeline: its grid of one stage.

    megatron-core's parallel_state does not fit: 0.16 lacks get_model_parallel_rank and similar functions.
    """
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid

    with without_known_prints():
        return PipelineParallelGrid(topology=pipeline_topology(topology))


def parallel_context(
    layout: ParallelConfig, training: TrainingConfig, drops: bool, topology: Topology
) -> ParallelContext:
    """Return this rank's share of every layer."""
    shares = topology.tensor_parallel_size * topology.context_parallel_size
    share = topology.tensor_parallel_rank * topology.context_parallel_size + topology.context_parallel_rank
    return ParallelContext(
        size=topology.tensor_parallel_size,
        rank=topology.tensor_parallel_rank,
        group=topology.tensor_group,
        sequence_parallel=layout.sequence_parallel,
        vocab_multiple=layout.vocab_multiple,
        dropout=DropoutStreams(training.seed, share, shares, enabled=drops),
        context_size=topology.context_parallel_size,
        context_rank=topology.context_parallel_rank,
        context_group=topology.context_group,
        rows=training.micro_batch_size,
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
    for description, names in zip(descriptions, layer_parameters(descriptions, frozen), strict=True):
        for parameter in (frozen[name] for name in names):
            if description.dtype not in (None, parameter.dtype):
                assert not hasattr(parameter, "ds_id")  # recipe/layout.py refuses it under stage 3
                parameter.data = parameter.data.to(description.dtype)


def gathered(parameter: torch.nn.Parameter) -> AbstractContextManager[Any]:
    """Gather a parameter that ZeRO-3 has partitioned; writes to it are kept."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
