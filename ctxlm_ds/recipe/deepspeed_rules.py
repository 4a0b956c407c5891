"""Combinations of DeepSpeed settings that fail late, have no effect, or break what this package promises.

Read from deepspeed 0.19.8 (runtime/engine.py, runtime/config.py, runtime/zero/*): each rule gives its reason.
In: the recipe and the JSON with owned keys settled. Out: problems. Not here: unknown and owned keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ctxlm_ds.recipe.deepspeed_features import feature_problems
from ctxlm_ds.recipe.layout import stage_problems
from ctxlm_ds.recipe.problems import Problem, show_value
from ctxlm_ds.recipe.schema import RunConfig

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
