"""DeepSpeed's own features that train something else, do nothing, or break here: each key with the reason.

Tried with deepspeed 0.19.8 on CPU ranks; docs/deepspeed.md lists every key and what was seen.
In: the recipe and the JSON. Out: problems. Not here: combinations of stages and offload (deepspeed_rules.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
        stood = _look_up(settings, path)
        if stood not in (None, "auto") and not any(stood is value or stood == value for value in neutral):
            yield Problem(path, f"{show_value(stood)}: {reason}; remove it")
    yield from _nvme_problems(settings)
    if config.optimizer.name == "from_ds_config":
        yield from _optimizer_problems(settings)


def _nvme_problems(settings: dict[str, Any]) -> Iterator[Problem]:
    section = _look_up(settings, "zero_optimization.offload_optimizer")
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
    kind = _look_up(settings, "optimizer.type")
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


def _look_up(settings: dict[str, Any], path: str) -> Any:
    value: Any = settings
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
