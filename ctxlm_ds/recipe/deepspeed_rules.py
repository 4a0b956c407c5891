"""DeepSpeed settings that would fail late, do nothing, or train something else, each refused with a reason.

The rules follow deepspeed 0.19.8 (runtime/engine.py, runtime/config.py, runtime/zero/*). docs/deepspeed.md lists every
key and how it was tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from ctxlm_ds.recipe.layout import stage_problems
from ctxlm_ds.recipe.problems import Problem, show_value
from ctxlm_ds.recipe.schema import RunConfig, TrainingConfig

OWN_CHECKPOINTS = "ctxlm_ds writes checkpoints that every layout can read (docs/checkpoints.md)"
NO_EXPERTS = "no model of ctxlm_ds has experts"
OWN_LOADER = "batches come from the loader of ctxlm_ds; it would do nothing"
RECOMPUTES = "training.activation_checkpointing recomputes activations; it would do nothing"
INFERENCE = "it serves inference, not pretraining"
SPLIT_HOOKS = "DeepSpeed fails in the backward pass of these models with it"
EQUAL_TENSORS = "DeepSpeed assumes that tensor-parallel ranks send identical tensors"
FP32_MASTER = "master weights are fp32, as are moments and checkpoints"
FIXED_SHAPE = "it changes the shape of the batches, which ctxlm_ds keeps constant"
STEPS_THE_REST = "neither the schedule nor a checkpoint reaches the optimizer that would step the rest"
CURRICULUM = (
    "a curriculum over sequence length changes the shape of the batches, which ctxlm_ds keeps constant (compiled "
    "kernels, exact losses and resume depend on it); train a run on short rows first and start the next one from it "
    "with initialize_from"
)

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "activation_checkpointing.partition_activations": ((False,), RECOMPUTES),
    "activation_checkpointing.cpu_checkpointing": ((False,), RECOMPUTES),
    "activation_checkpointing.contiguous_memory_optimization": ((False,), RECOMPUTES),
    "activation_checkpointing.number_checkpoints": ((), RECOMPUTES),
    "activation_checkpointing.synchronize_checkpoint_boundary": ((False,), RECOMPUTES),
    "activation_checkpointing.profile": ((False,), RECOMPUTES),
    "autotuning.enabled": ((False,), "DeepSpeed's autotuner starts and stops separate runs; it would do nothing"),
    "bf16.bf16_master_weights_and_grads": ((False,), FP32_MASTER),
    "bf16.bf16_optimizer_states": ((False,), FP32_MASTER),
    "checkpoint": (({},), OWN_CHECKPOINTS),
    "compile.autoep_non_moe": ((False,), NO_EXPERTS),
    "compile.deepcompile": ((False,), "training.compile compiles each transformer layer; it would do nothing"),
    "data_efficiency.data_routing.enabled": ((False,), "random layer-token dropping needs layers made for it"),
    "data_efficiency.data_sampling.curriculum_learning.enabled": ((False,), CURRICULUM),
    "data_efficiency.data_sampling.dynamic_batching.enabled": ((False,), FIXED_SHAPE),
    "data_efficiency.data_sampling.enabled": ((False,), OWN_LOADER),
    "data_efficiency.enabled": ((False,), OWN_LOADER),
    "data_parallel_size": ((), "the data-parallel size is the world size divided by the other sizes"),
    "data_types.param_dtype": ((), "training.precision casts the weights"),
    "dataloader_drop_last": ((False,), OWN_LOADER),
    "datastates_ckpt": ((), OWN_CHECKPOINTS),
    "expert_parallel.enabled": ((False,), NO_EXPERTS),
    "fp16.auto_cast": ((False,), "batches hold integers, which need no cast"),
    "fp16.fp16_master_weights_and_grads": ((False,), FP32_MASTER),
    "fp16.loss_scale": ((0, 0.0), "a fixed scale keeps overflowing once it is too large; leave it dynamic (0)"),
    "gradient_allreduce_op": (("mean",), "the step's loss is exact only if DeepSpeed averages over the ranks"),
    "hybrid_engine.enabled": ((False,), INFERENCE),
    "managed_gradient_accumulation": ((True,), "the complete step is one accumulation of DeepSpeed"),
    "pipeline.activation_checkpoint_interval": ((0,), "set training.activation_checkpointing in the recipe"),
    "pipeline.grad_partitioned": ((False,), EQUAL_TENSORS),
    "pipeline.partition": (("best",), "set parallel.pipeline_partition in the recipe"),
    "pipeline.pipe_partitioned": ((False,), EQUAL_TENSORS),
    "pipeline.seed_layers": ((False,), "initial weights depend on training.seed and the parameter's name alone"),
    "pipeline.stages": (("auto",), "set parallel.pipeline_parallel_size in the recipe"),
    "sequence_parallel_size": ((1,), "this is DeepSpeed-Ulysses; ctxlm_ds has parallel.sequence_parallel"),
    "tensor_parallel.autotp_size": ((0,), "parallel.tensor_parallel_size in the recipe splits the layers"),
    "torch_autocast.enabled": ((False,), "training.precision decides the data type of every operation"),
    "use_data_before_expert_parallelism": ((False,), NO_EXPERTS),
    "weight_quantization.post_init_quant": (({},), INFERENCE),
    "weight_quantization.quantized_initialization": (({},), INFERENCE),
    "zero_optimization.compute_grad_norm": ((True,), "the run reports the gradient norm and stops at a NaN in it"),
    "zero_optimization.cpu_offload": ((False,), 'an old form; write "offload_optimizer": {"device": "cpu"}'),
    "zero_optimization.cpu_offload_param": ((False,), 'an old form; write "offload_param": {"device": "cpu"}'),
    "zero_optimization.leaf_module": ((), SPLIT_HOOKS),
    "zero_optimization.legacy_stage1": ((False,), "DeepSpeed has removed it"),
    "zero_optimization.load_from_fp32_weights": ((True,), OWN_CHECKPOINTS),
    "zero_optimization.module_granularity_threshold": ((0,), SPLIT_HOOKS),
    "zero_optimization.offload_optimizer.ratio": ((1, 1.0), STEPS_THE_REST),
    "zero_optimization.offload_optimizer.super_offload": (
        (False,), "it steps in separate processes, which neither the schedule nor a checkpoint reaches",
    ),
    "zero_optimization.round_robin_gradients": (
        (False,), "it reorders the fp32 partitions: initial weights and checkpoints would go to wrong places",
    ),
    "zero_optimization.stage3_module_granularity_threshold": ((0,), SPLIT_HOOKS),
    "zero_optimization.zenflow": ((), "it applies parts of an update some steps late: another algorithm than AdamW"),
}  # fmt: skip
"""Values of each setting that are accepted (those that change nothing), and why any other is refused."""
IGNORED = (
    "activation_checkpointing", "allgather_size", "autotuning", "checkpoint", "compile", "data_efficiency",
    "data_parallel_size", "dataloader_drop_last", "datastates_ckpt", "disable_allgather", "expert_parallel",
    "hybrid_engine", "seq_parallel_communication_data_type", "sequence_parallel_size", "tensor_parallel",
    "torch_autocast", "use_data_before_expert_parallelism", "vocabulary_size", "weight_quantization",
)  # fmt: skip
"""Settings that have no effect with the values accepted here; DeepSpeed does not get them."""

DISABLED = (None, "auto")


def find_conflicts(config: RunConfig, settings: dict[str, Any], world_size: int) -> list[Problem]:
    """Return every setting that is refused and every combination that cannot work, each with the reason.

    The types in `settings`, the JSON with the values of the recipe, have been checked.
    """
    zero = _section(settings, "zero_optimization")
    stage = 0 if zero.get("stage") in DISABLED else int(zero["stage"])
    problems = [*_refused_settings(settings), *_stage_rules(config.training, stage)]
    problems += stage_problems(config.parallel, config.training, config.teacher, stage)
    problems += _offload_rules(zero, stage)
    problems += _communication_rules(settings, zero, stage)
    problems += config.optimizer.stage_problems(stage)
    problems += _partition_rules(zero, stage, config.parallel.data_parallel_size(world_size))
    return problems


def _refused_settings(settings: dict[str, Any]) -> Iterator[Problem]:
    for path, (neutral, reason) in REFUSED.items():
        *above, name = path.split(".")
        value = reduce(_section, above, settings).get(name)
        if value not in DISABLED and not any(value is other or value == other for other in neutral):
            yield Problem(path, f"{show_value(value)}: {reason}; remove it")


def _stage_rules(training: TrainingConfig, stage: int) -> Iterator[Problem]:
    precision = training.precision
    if stage == 0 and precision != "fp32":
        accumulation = training.grad_accum_dtype
        reason = (
            f"DeepSpeed raises NotImplementedError for {precision} weights with {accumulation} gradient accumulation"
            if accumulation != precision
            else f"gradients would be accumulated in {precision}, and another wrapper would keep the fp32 weights"
        )
        yield Problem(
            "zero_optimization.stage",
            f"0 does not work with training.precision {precision}: {reason}; use stage 1 (zero1: the same numbers, "
            "less memory) or set training.precision to fp32",
        )


def _offload_rules(zero: dict[str, Any], stage: int) -> Iterator[Problem]:
    optimizer, parameters = _section(zero, "offload_optimizer"), _section(zero, "offload_param")
    if optimizer.get("device") in ("cpu", "nvme") and stage == 0:
        text = "stage 0 keeps the optimizer on the device; use stage 1, 2 or 3"
        yield Problem("zero_optimization.offload_optimizer", text)
    if parameters.get("device") in ("cpu", "nvme") and stage != 3:
        yield Problem("zero_optimization.offload_param", f"stage {stage} does not partition parameters; use stage 3")
    for name, section in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if section.get("device") == "nvme" and not section.get("nvme_path"):
            yield Problem(f"zero_optimization.{name}.nvme_path", "missing; device nvme needs a folder on that disk")
    for name in ("pipeline_read", "pipeline_write"):
        if optimizer.get("device") == "nvme" and optimizer.get(name) not in (*DISABLED, False):
            text = f"{show_value(optimizer[name])}: on NVMe, writes would overlap setting and saving weights; remove it"
            yield Problem(f"zero_optimization.offload_optimizer.{name}", text)
    if optimizer.get("device") == "nvme" and stage != 3:
        yield Problem("zero_optimization.offload_optimizer.device", f'"nvme" needs stage 3, not {stage}; use "cpu"')


def _communication_rules(settings: dict[str, Any], zero: dict[str, Any], stage: int) -> Iterator[Problem]:
    bucket = zero.get("allgather_bucket_size", "auto")
    if stage in (1, 2) and isinstance(bucket, int) and bucket % 2:
        text = f"{bucket}: stages 1 and 2 need an even number of elements; use {bucket + 1}"
        yield Problem("zero_optimization.allgather_bucket_size", text)
    if stage < 2 or zero.get("reduce_scatter", True) not in (True, "auto"):
        return
    for path, neutral in (("gradient_predivide_factor", 1.0), ("prescale_gradients", False)):
        stood = settings.get(path, neutral)
        if stood not in (neutral, "auto"):
            yield Problem(
                path,
                f"{show_value(stood)}: ZeRO stage {stage} with reduce_scatter does not scale gradients first; "
                "remove it, or set zero_optimization.reduce_scatter to false",
            )


def _partition_rules(zero: dict[str, Any], stage: int, ranks: int) -> Iterator[Problem]:
    """Yield settings of ZeRO-3's partitions that do not fit the ranks, and settings given under two names."""
    size = zero.get("zero_hpz_partition_size", 1)
    if size not in (*DISABLED, 1) and (stage != 3 or ranks % size):
        text = f"{size}: needs stage 3 and a divisor of the {ranks} data-parallel ranks; remove it"
        yield Problem("zero_optimization.zero_hpz_partition_size", text)
    given: dict[str, str] = {}
    for name in zero:
        # 0.19.8 renamed one setting and keeps its old name in addition to the two new ones.
        first = given.setdefault(name.removeprefix("stage3_").replace("gather_fp16", "gather_16bit"), name)
        if first != name:
            yield Problem(f"zero_optimization.{name}", f"{first} is the same setting; remove one of them")


def _section(holder: dict[str, Any], name: str) -> dict[str, Any]:
    value = holder.get(name)
    return value if isinstance(value, dict) else {}
