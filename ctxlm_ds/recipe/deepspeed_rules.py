"""DeepSpeed settings that do not exist, have a wrong value, would fail late, do nothing, or train something else.

deepspeed_keys.json has the keys, types and ranges of DeepSpeed's own config models, written from the pinned release by
tests/deepspeed_source.py, so that a recipe is checked without torch. deepspeed_rules.json has types of settings without
a model, and the settings that are refused, each with the accepted values and the reason. The combinations follow
deepspeed 0.19.8 (runtime/engine.py, runtime/config.py, runtime/zero/*).
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from functools import cache, reduce
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ctxlm_ds.recipe.describe import describe_type
from ctxlm_ds.recipe.layout import stage_problems
from ctxlm_ds.recipe.problems import Problem, nearest_name, show_value
from ctxlm_ds.recipe.schema import ParallelConfig, TeacherConfig, TrainingConfig
from ctxlm_ds.recipe.sections import OptimizerSection
from ctxlm_ds.recipe.yaml_source import integral_floats_as_ints

KeyPath = tuple[str, ...]
KEYS_FILE = Path(__file__).with_name("deepspeed_keys.json")
OWN_RULES = json.loads(KEYS_FILE.with_name("deepspeed_rules.json").read_text(encoding="utf-8"))
REFUSED: dict[str, tuple[list[Any], str]] = {
    path: (rule["accepted"], rule["reason"]) for path, rule in OWN_RULES["refused"].items()
}
"""Values of each setting that are accepted (those that change nothing), and why any other is refused."""
CURRICULUM = REFUSED["data_efficiency.data_sampling.curriculum_learning.enabled"][1]
IGNORED: list[str] = OWN_RULES["ignored"]
"""Settings that have no effect with the values accepted here; DeepSpeed does not get them."""
CLOSED_SECTIONS = ("aio", "comet", "csv_monitor", "pipeline", "tensorboard", "wandb")
"""Sections whose keys are those of the rules."""
AUTO = "auto"
DISABLED = (None, AUTO)
TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str, "list": list[str]}


@cache
def deepspeed_keys() -> dict[str, Any]:
    """Return the settings of the pinned DeepSpeed, by dotted paths.

    They are the keys at the `top_level`, those of each `nested` section whose keys are all known, `removed` keys of
    older releases with DeepSpeed's reason, type and range of the `values` of its pydantic models, and the parameters of
    the `optimizers` that can be handed over.
    """
    return json.loads(KEYS_FILE.read_text(encoding="utf-8"))


@cache
def rules() -> dict[str, Any]:
    """Return the type of every setting whose values are checked, by its dotted path."""
    return {path: _annotation(field) for path, field in (deepspeed_keys()["values"] | OWN_RULES["types"]).items()}


@cache
def sections() -> frozenset[str]:
    """Return the dotted path of every section."""
    names = [path.split(".") for path in (*rules(), *(f"{path}." for path in deepspeed_keys()["nested"]))]
    return frozenset(".".join(parts[:depth]) for parts in names for depth in range(1, len(parts)))


def _annotation(field: dict[str, Any]) -> Any:
    annotation = Literal[tuple(field["values"])] if "values" in field else TYPES[field["type"]]
    if annotation in (int, float):
        bounds = {"le": 2**63 - 1 if annotation is int else 1e300} | {key: field[key] for key in field if len(key) == 2}
        annotation = Annotated[annotation, Field(**(bounds if {"ge", "gt"} & set(bounds) else {"ge": 0} | bounds))]
    return annotation | None if field.get("null") else annotation


def setting_problems(settings: dict[str, Any], skip: Container[str], path: KeyPath = ()) -> Iterator[Problem]:
    """Yield keys of a JSON (or of its section at `path`) that DeepSpeed does not read, and wrong values; remove them.

    Other rules check the values of the dotted paths in `skip`.
    """
    for name, value in list(settings.items()):
        here = ".".join((*path, name))
        reason = _why_unknown((*path, name), value) or (None if here in skip else _why_wrong(here, value))
        if reason is not None:
            del settings[name]
            yield Problem(here, reason)
        elif value is None and (here in skip or here in sections()):
            del settings[name]
        elif isinstance(value, dict):
            yield from setting_problems(value, skip, (*path, name))


def _why_unknown(path: KeyPath, value: Any) -> str | None:
    *section, name = path
    keys, here = deepspeed_keys(), ".".join(path)
    if here in keys["removed"]:
        return CURRICULUM if name == "curriculum_learning" else keys["removed"][here]
    if not section:
        known = keys["top_level"]
    elif section[0] in CLOSED_SECTIONS:
        known = {other.split(".")[1] for other in (*rules(), *REFUSED) if other.startswith(f"{section[0]}.")}
    else:
        known = keys["nested"].get(".".join(section))
    if known is None or name in known:
        return None
    near = nearest_name(name, known)
    hint = f"; did you mean {'.'.join((*section, near))}?" if near else "; remove it"
    return f"DeepSpeed reads no such key (value {show_value(value)}){hint}"


def _why_wrong(here: str, value: Any) -> str | None:
    if value == AUTO or (value is None and here in sections()):
        return None
    if here in sections():
        return None if isinstance(value, dict) else f"{show_value(value)}: expected a section"
    return type_problem(value, rules()[here]) if here in rules() else None


def type_problem(value: Any, annotation: Any) -> str | None:
    """Return what is wrong with a value of a type, or None."""
    try:
        TypeAdapter(annotation).validate_json(json.dumps(integral_floats_as_ints(value)), strict=True)
    except ValidationError:
        return f"{show_value(value)}: expected {describe_type(annotation)}"
    return None


def find_conflicts(
    training: TrainingConfig, parallel: ParallelConfig, optimizer: OptimizerSection, teacher: TeacherConfig,
    settings: dict[str, Any], world_size: int,
) -> Iterator[Problem]:  # fmt: skip
    """Yield every setting that is refused and every combination that cannot work, each with the reason.

    The types in `settings`, the JSON with the values of the recipe, have been checked.
    """
    zero = _section(settings, "zero_optimization")
    stage = 0 if zero.get("stage") in DISABLED else int(zero["stage"])
    for path, (accepted, reason) in REFUSED.items():
        *above, name = path.split(".")
        value = reduce(_section, above, settings).get(name)
        if value not in DISABLED and value not in accepted:
            yield Problem(path, f"{show_value(value)}: {reason}; remove it")
    yield from _precision_rules(training, stage)
    yield from optimizer.stage_problems(stage)
    yield from stage_problems(parallel, training, teacher, stage)
    yield from _offload_rules(zero, stage)
    places = (_section(zero, f"offload_{name}").get("device") for name in ("optimizer", "param"))
    offloads = any(place in ("cpu", "nvme") for place in places)
    if training.ema is not None and offloads:
        text = f"{training.ema:g}: with offload there are no weights on the device to average; set null"
        yield Problem("training.ema", text, ("zero_optimization.offload_optimizer",))
    yield from _communication_rules(settings, zero, stage)
    yield from _partition_rules(zero, stage, parallel.data_parallel_size(world_size))
    for section, remedy in OWN_RULES["monitors"].items():
        if _section(settings, section).get("enabled") is True:
            text = f"true, but DeepSpeed's monitors know neither evaluations nor a resume; {remedy}, and remove it here"
            yield Problem(f"{section}.enabled", text)


def _precision_rules(training: TrainingConfig, stage: int) -> Iterator[Problem]:
    precision, accumulation = training.precision, training.grad_accum_dtype
    if stage != 0 or precision == "fp32":
        return
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
    place = "zero_optimization.offload_optimizer"
    if optimizer.get("device") in ("cpu", "nvme") and stage == 0:
        yield Problem(place, "stage 0 keeps the optimizer on the device; use stage 1, 2 or 3")
    if parameters.get("device") in ("cpu", "nvme") and stage != 3:
        yield Problem("zero_optimization.offload_param", f"stage {stage} does not partition parameters; use stage 3")
    for name, section in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if section.get("device") == "nvme" and not section.get("nvme_path"):
            yield Problem(f"zero_optimization.{name}.nvme_path", "missing; device nvme needs a folder on that disk")
    if optimizer.get("device") != "nvme":
        return
    for name in ("pipeline_read", "pipeline_write"):
        if optimizer.get(name) not in (*DISABLED, False):
            text = f"{show_value(optimizer[name])}: on NVMe, writes would overlap setting and saving weights; remove it"
            yield Problem(f"{place}.{name}", text)
    if stage != 3:
        yield Problem(f"{place}.device", f'"nvme" needs stage 3, not {stage}; use "cpu"')


def _communication_rules(settings: dict[str, Any], zero: dict[str, Any], stage: int) -> Iterator[Problem]:
    bucket = zero.get("allgather_bucket_size", AUTO)
    if stage in (1, 2) and isinstance(bucket, int) and bucket % 2:
        text = f"{bucket}: stages 1 and 2 need an even number of elements; use {bucket + 1}"
        yield Problem("zero_optimization.allgather_bucket_size", text)
    if stage < 2 or zero.get("reduce_scatter", True) not in (True, AUTO):
        return
    for path, neutral in (("gradient_predivide_factor", 1.0), ("prescale_gradients", False)):
        stood = settings.get(path, neutral)
        if stood not in (neutral, AUTO):
            text = (
                f"{show_value(stood)}: ZeRO stage {stage} with reduce_scatter does not scale gradients first; "
                "remove it, or set zero_optimization.reduce_scatter to false"
            )
            yield Problem(path, text)


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
