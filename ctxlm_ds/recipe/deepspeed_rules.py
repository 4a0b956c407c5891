"""DeepSpeed settings and combinations that fail late, do nothing, train something else, or break what is promised here.

Read from deepspeed 0.19.8 (runtime/engine.py, runtime/config.py, runtime/zero/*): each rule gives its reason.
Features were tried on CPU ranks; docs/deepspeed.md lists every key and what was seen.
In: the recipe and the JSON with owned keys settled. Out: problems. Not here: unknown and owned keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ctxlm_ds.recipe.layout import stage_problems
from ctxlm_ds.recipe.problems import Problem, nearest_name, show_value
from ctxlm_ds.recipe.schema import RunConfig

OWN_CHECKPOINTS = "ctxlm_ds writes its own checkpoints, which every layout can read (docs/checkpoints.md)"
NO_EXPERTS = "no model of ctxlm_ds has experts"
OWN_LOADER = "batches come from ctxlm_ds's own loader; it would do nothing"
RECOMPUTES = "the models are recomputed by training.activation_checkpointing; it would do nothing"
INFERENCE = "it serves inference, not pretraining"
SPLIT_HOOKS = "with it DeepSpeed fails in the backward pass of these models"
FIRST_FP32 = "weights are cast by training.precision"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "activation_checkpointing.partition_activations": ((False,), RECOMPUTES),
    "activation_checkpointing.cpu_checkpointing": ((False,), RECOMPUTES),
    "activation_checkpointing.contiguous_memory_optimization": ((False,), RECOMPUTES),
    "activation_checkpointing.number_checkpoints": ((), RECOMPUTES),
    "activation_checkpointing.synchronize_checkpoint_boundary": ((False,), RECOMPUTES),
    "activation_checkpointing.profile": ((False,), RECOMPUTES),
    "autotuning.enabled": ((False,), "DeepSpeed's autotuner starts and stops runs of its own; it would do nothing"),
    "checkpoint": (({},), OWN_CHECKPOINTS),
    "datastates_ckpt": ((), OWN_CHECKPOINTS),
    "compile.deepcompile": ((False,), "training.compile compiles each transformer layer; it would do nothing"),
    "compile.autoep_non_moe": ((False,), NO_EXPERTS),
    "data_types.param_dtype": ((), FIRST_FP32),
    "dataloader_drop_last": ((False,), OWN_LOADER),
    "expert_parallel.enabled": ((False,), NO_EXPERTS),
    "use_data_before_expert_parallelism": ((False,), NO_EXPERTS),
    "weight_quantization.quantized_initialization": (({},), INFERENCE),
    "weight_quantization.post_init_quant": (({},), INFERENCE),
    "fp16.loss_scale": ((0, 0.0), "a fixed scale overflows for ever once it does; leave it dynamic (0)"),
    "pipeline.stages": (("auto",), "set parallel.pipeline_parallel_size in the recipe"),
    "pipeline.partition": (("best",), "set parallel.pipeline_partition in the recipe"),
    "pipeline.seed_layers": ((False,), "initial weights depend on training.seed and the parameter's name alone"),
    "pipeline.activation_checkpoint_interval": ((0,), "set training.activation_checkpointing in the recipe"),
    "pipeline.pipe_partitioned": ((False,), "DeepSpeed takes tensor-parallel ranks to pass on equal tensors"),
    "pipeline.grad_partitioned": ((False,), "DeepSpeed takes tensor-parallel ranks to pass back equal tensors"),
    "zero_optimization.cpu_offload": ((False,), 'an old form; write "offload_optimizer": {"device": "cpu"}'),
    "zero_optimization.cpu_offload_param": ((False,), 'an old form; write "offload_param": {"device": "cpu"}'),
    "zero_optimization.legacy_stage1": ((False,), "DeepSpeed has removed it"),
    "zero_optimization.leaf_module": ((), SPLIT_HOOKS),
    "zero_optimization.module_granularity_threshold": ((0,), SPLIT_HOOKS),
    "zero_optimization.stage3_module_granularity_threshold": ((0,), SPLIT_HOOKS),
    "zero_optimization.round_robin_gradients": (
        (False,), "it reorders the fp32 partitions, so that initial weights and checkpoints would go to wrong places",
    ),
    "zero_optimization.load_from_fp32_weights": ((True,), OWN_CHECKPOINTS),
    "zero_optimization.zenflow": ((), "it applies parts of an update some steps late: another algorithm than AdamW"),
    "zero_optimization.offload_optimizer.super_offload": (
        (False,), "it steps on its own processes, which neither the schedule nor a checkpoint reaches",
    ),
    "zero_optimization.offload_optimizer.ratio": (
        (1, 1.0), "DeepSpeed steps the rest with an optimizer of its own, which neither the schedule nor a checkpoint "
        "reaches",
    ),
}  # fmt: skip
"""Key: the values that change nothing, and why any other is refused."""

ELEMENTWISE_OPTIMIZERS = ("Adam", "AdamW", "Lion", "SGD", "RMSprop", "RAdam", "Adamax", "Adadelta", "Rprop")
"""Their update of an element rests on that element alone, so that ZeRO may cut parameters anywhere."""
DEEPSPEED_SPELLS = frozenset({"adam", "adamw", "lion"})
"""Names that DeepSpeed takes in any case; all others are torch.optim's, spelt exactly."""
REFUSED_OPTIMIZERS = {
    "lamb": "its trust ratios would be those of each rank's shard; optimizer.name lamb in the recipe is exact",
    "onebitadam": "this DeepSpeed has no 1-bit optimizers any more",
    "onebitlamb": "this DeepSpeed has no 1-bit optimizers any more",
    "zerooneadam": "this DeepSpeed has no 1-bit optimizers any more",
    "muon": "it keeps other moments for matrices than for vectors, which a checkpoint cannot hold",
    "adagrad": "DeepSpeed builds it anew and loses the parameter groups (the first step fails)",
    "adafactor": "ZeRO hands it flat shards, where it has neither rows nor columns",
    "lbfgs": "it needs to evaluate the loss several times a step",
    "sparseadam": "gradients here are dense",
    "nadam": "it keeps a product of momenta that a checkpoint cannot hold",
    "asgd": "it keeps averages that a checkpoint cannot hold",
    "muadam": "the layers are not parametrised for it",
    "muadamw": "the layers are not parametrised for it",
    "musgd": "the layers are not parametrised for it",
}


def feature_problems(config: RunConfig, settings: dict[str, Any]) -> Iterator[Problem]:
    """Every key of DeepSpeed's JSON that asks for what cannot be had here."""
    for path, (neutral, reason) in REFUSED.items():
        stood = _look_up(settings, tuple(path.split(".")))
        if stood not in DISABLED and not any(stood is value or stood == value for value in neutral):
            yield Problem(path, f"{show_value(stood)}: {reason}; remove it")
    yield from _nvme_problems(settings)
    if config.optimizer.name == "from_ds_config":
        yield from _optimizer_problems(settings)


def _nvme_problems(settings: dict[str, Any]) -> Iterator[Problem]:
    section = _look_up(settings, ("zero_optimization", "offload_optimizer"))
    if not isinstance(section, dict) or section.get("device") != "nvme":
        return
    for name in ("pipeline_read", "pipeline_write"):
        if section.get(name) not in (None, False, "auto"):
            yield Problem(
                f"zero_optimization.offload_optimizer.{name}",
                f"{show_value(section[name])}: on NVMe it leaves writes under way while weights are set or saved; "
                "remove it",
            )


def _optimizer_problems(settings: dict[str, Any]) -> Iterator[Problem]:
    kind = _look_up(settings, ("optimizer", "type"))
    if not isinstance(kind, str) or kind == "auto":
        return
    allowed = ", ".join(ELEMENTWISE_OPTIMIZERS)
    reason = REFUSED_OPTIMIZERS.get(kind.lower())
    if reason is not None:
        yield Problem("optimizer.type", f"{kind}: {reason}; choose one of {allowed}, or optimizer.name in the recipe")
    elif kind not in ELEMENTWISE_OPTIMIZERS and kind.lower() not in DEEPSPEED_SPELLS:
        near = nearest_name(kind, ELEMENTWISE_OPTIMIZERS)
        hint = f"did you mean {near}? " if near else ""
        yield Problem("optimizer.type", f"{kind}: {hint}expected one of {allowed}")


STAGES = (0, 1, 2, 3)
FIXED_VALUES: dict[tuple[str, ...], tuple[Any, str]] = {
    ("gradient_allreduce_op",): ("mean", "the step's loss is exact only where DeepSpeed averages over the ranks"),
    ("managed_gradient_accumulation",): (True, "the whole step is given to DeepSpeed as its accumulation"),
    ("sequence_parallel_size",): (1, "this is DeepSpeed-Ulysses; parallel.sequence_parallel is what ctxlm_ds has"),
    ("data_parallel_size",): (None, "the data-parallel size is what remains of the world"),
    ("tensor_parallel", "autotp_size"): (0, "the layers are split by parallel.tensor_parallel_size in the recipe"),
    ("hybrid_engine", "enabled"): (False, "it serves generation, not pretraining"),
    ("torch_autocast", "enabled"): (False, "training.precision decides the data type of every operation"),
    ("bf16", "bf16_master_weights_and_grads"): (False, "master weights are fp32 (checkpoints hold them so)"),
    ("bf16", "bf16_optimizer_states"): (False, "moments are fp32 (checkpoints hold them so)"),
    ("fp16", "fp16_master_weights_and_grads"): (False, "master weights are fp32 (checkpoints hold them so)"),
    ("fp16", "auto_cast"): (False, "batches hold integers; nothing is to be cast"),
    ("zero_optimization", "compute_grad_norm"): (True, "the run reports the gradient norm and stops at a NaN in it"),
    ("data_efficiency", "data_sampling", "curriculum_learning", "enabled"): (
        False,
        "a curriculum over sequence length changes the shape of the batches, which ctxlm_ds keeps constant",
    ),
    ("data_efficiency", "data_sampling", "dynamic_batching", "enabled"): (
        False,
        "it changes the shape of the batches, which ctxlm_ds keeps constant",
    ),
    ("data_efficiency", "data_sampling", "enabled"): (False, "batches come from ctxlm_ds's own loader"),
    ("data_efficiency", "data_routing", "enabled"): (False, "random layer-token dropping needs layers made for it"),
    ("data_efficiency", "enabled"): (False, "batches come from ctxlm_ds's own loader"),
}
"""Settings with one possible value here, and why."""
DISABLED = (None, "auto")


def find_conflicts(config: RunConfig, settings: dict[str, Any]) -> list[Problem]:
    """Every combination that cannot work, in the user's words and with the reason."""
    zero = settings.get("zero_optimization", {})
    if not isinstance(zero, dict):
        return [Problem("zero_optimization", f'{show_value(zero)}: expected a section such as {{"stage": 1}}')]
    problems = list(_fixed_values(settings))
    stage = zero.get("stage", 0)
    stage = 0 if stage == "auto" else stage
    if isinstance(stage, bool) or stage not in STAGES:
        return [*problems, Problem("zero_optimization.stage", f"{show_value(stage)}: expected one of 0, 1, 2, 3")]
    problems += [*_stage_rules(config, int(stage)), *stage_problems(config, int(stage))]
    problems += _offload_rules(config, zero, int(stage))
    problems += _communication_rules(settings, zero, int(stage))
    problems += feature_problems(config, settings)
    return problems


def _fixed_values(settings: dict[str, Any]) -> Iterator[Problem]:
    for path, (value, reason) in FIXED_VALUES.items():
        stood = _look_up(settings, path)
        if stood not in DISABLED and stood != value:
            remedy = "remove it" if value is None else f"set it to {show_value(value)} or remove it"
            yield Problem(".".join(path), f"{show_value(stood)}: {reason}; {remedy}")


def _stage_rules(config: RunConfig, stage: int) -> Iterator[Problem]:
    precision = config.training.precision
    if stage == 0 and precision != "fp32":
        accumulation = config.training.grad_accum_dtype
        reason = (
            f"DeepSpeed raises NotImplementedError for {precision} weights with {accumulation} gradient accumulation"
            if accumulation != precision
            else f"gradients would be added up in {precision}, and another wrapper would keep the fp32 weights"
        )
        yield Problem(
            "zero_optimization.stage",
            f"0 does not go with training.precision {precision}: {reason}; use stage 1 (zero1: the same numbers, less "
            "memory) or set training.precision to fp32",
        )


def _offload_rules(config: RunConfig, zero: dict[str, Any], stage: int) -> Iterator[Problem]:
    optimizer, parameters = _section(zero, "offload_optimizer"), _section(zero, "offload_param")
    if _offloads(optimizer) and stage == 0:
        text = "stage 0 keeps the whole optimizer on the device; use stage 1, 2 or 3"
        yield Problem("zero_optimization.offload_optimizer", text)
    if _offloads(parameters) and stage != 3:
        yield Problem("zero_optimization.offload_param", f"stage {stage} does not partition parameters; use stage 3")
    for name, section in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if section.get("device") == "nvme" and not section.get("nvme_path"):
            yield Problem(f"zero_optimization.{name}.nvme_path", "missing; device nvme needs a folder on that disk")
    if optimizer.get("device") == "nvme" and stage != 3:
        yield Problem("zero_optimization.offload_optimizer.device", f'"nvme" needs stage 3, not {stage}; use "cpu"')


def _communication_rules(settings: dict[str, Any], zero: dict[str, Any], stage: int) -> Iterator[Problem]:
    """ZeRO's reduce-scatter takes the gradients as they are, and its gather aligns to two elements."""
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
                f"{show_value(stood)}: ZeRO stage {stage} with reduce_scatter does not scale gradients beforehand; "
                "remove it, or set zero_optimization.reduce_scatter to false",
            )


def _offloads(section: dict[str, Any]) -> bool:
    return section.get("device", "none") not in ("none", "auto", None)


def _section(holder: dict[str, Any], name: str) -> dict[str, Any]:
    value = holder.get(name)
    return value if isinstance(value, dict) else {}


def _look_up(settings: dict[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = settings
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value
