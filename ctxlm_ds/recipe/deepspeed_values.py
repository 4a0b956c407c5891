"""Types and ranges of DeepSpeed's settings, checked without importing DeepSpeed or torch.

deepspeed_keys.json has the fields of DeepSpeed's own pydantic models, written from the pinned release by
tests/deepspeed_source.py. RULES has the settings that DeepSpeed reads without a model, and narrower ranges.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ctxlm_ds.recipe.describe import describe_type
from ctxlm_ds.recipe.load import integral_floats_as_ints
from ctxlm_ds.recipe.problems import Problem, show_value

KeyPath = tuple[str, ...]
KEYS_FILE = Path(__file__).with_name("deepspeed_keys.json")
AUTO = "auto"
Count = Annotated[int, Field(ge=1, le=10**12)]
Factor = Annotated[float, Field(gt=0.0, le=1e6)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Dtype = Literal["fp16", "bf16", "fp32"]
TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str, "list": list[str]}
FLAGS = (
    "disable_allgather", "disable_python_gc", "dump_state", "memory_breakdown", "prescale_gradients",
    "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "aio.overlap_events",
    "aio.single_submit", "aio.use_gds", "flops_profiler.detailed", "flops_profiler.enabled", "optimizer.legacy_fusion",
    "pipeline.use_reentrant",
)  # fmt: skip
COUNTS = (
    "allgather_size", "steps_per_print", "vocabulary_size", "aio.block_size", "aio.intra_op_parallelism",
    "aio.queue_depth", "flops_profiler.profile_step", "flops_profiler.top_modules", "fp16.hysteresis",
    "fp16.loss_scale_window", "fp16.min_loss_scale", "comet.samples_log_interval",
    "zero_optimization.allgather_bucket_size", "zero_optimization.reduce_bucket_size",
    "zero_optimization.sub_group_size", "zero_optimization.offload_optimizer.buffer_count",
    "zero_optimization.offload_param.buffer_count", "zero_optimization.offload_param.buffer_size",
    "zero_optimization.zero_hpz_partition_size",
)  # fmt: skip
RULES: dict[str, Any] = {
    **dict.fromkeys(FLAGS, bool),
    **dict.fromkeys(COUNTS, Count),
    "communication_data_type": Dtype | None,
    "data_types.buffer_dtype": Dtype | None,
    "data_types.keep_in_fp32_modules": list[str],
    "flops_profiler.module_depth": Annotated[int, Field(ge=-1, le=1000)],
    "flops_profiler.output_file": str | None,
    "flops_profiler.recompute_fwd_factor": Annotated[float, Field(ge=0.0, le=1e6)],
    "gradient_predivide_factor": Factor,
    "log_level": Literal["debug", "info", "warning", "error", "critical"],
    "optimizer.type": str,
    "seq_parallel_communication_data_type": Dtype | None,
}
MONITORS = {
    "tensorboard": "set logging.trackers: [tensorboard] in the recipe",
    "wandb": "set logging.trackers: [wandb] in the recipe",
    "csv_monitor": "read the figures from RUN/metrics.jsonl",
    "comet": "set logging.trackers in the recipe to tensorboard, wandb or mlflow",
}
"""DeepSpeed's monitors, and what to use instead."""


@dataclass(frozen=True, slots=True)
class DeepSpeedKeys:
    """Settings that DeepSpeed reads."""

    top_level: frozenset[str]
    nested: dict[KeyPath, frozenset[str]]
    """Keys of each section whose keys are all known, by its path."""
    removed: dict[KeyPath, str]
    """Keys of older releases that DeepSpeed refuses, with its reason."""
    values: dict[str, dict[str, Any]]
    """Type and range of each field of DeepSpeed's pydantic models, by its dotted path."""
    optimizers: dict[str, list[str]]
    """Parameters of each optimizer that can be handed over."""


@cache
def deepspeed_keys() -> DeepSpeedKeys:
    """Return the settings of the pinned DeepSpeed."""
    content = json.loads(KEYS_FILE.read_text(encoding="utf-8"))
    return DeepSpeedKeys(
        frozenset(content["top_level"]),
        {tuple(path.split(".")): frozenset(names) for path, names in content["nested"].items()},
        {tuple(path.split(".")): text for path, text in content["removed"].items()},
        content["values"],
        content["optimizers"],
    )


@cache
def rules() -> dict[str, Any]:
    """Return the type of every setting whose values are checked, by its dotted path."""
    return {path: _annotation(field) for path, field in deepspeed_keys().values.items()} | RULES


@cache
def sections() -> frozenset[str]:
    """Return the dotted path of every section."""
    paths = [*rules(), *(".".join(path) + "." for path in deepspeed_keys().nested)]
    names = [path.split(".") for path in paths]
    return frozenset(".".join(parts[:depth]) for parts in names for depth in range(1, len(parts)))


def _annotation(field: dict[str, Any]) -> Any:
    annotation = Literal[tuple(field["values"])] if "values" in field else TYPES[field["type"]]
    if annotation in (int, float):
        bounds = {"le": 2**63 - 1 if annotation is int else 1e300} | {key: field[key] for key in field if len(key) == 2}
        annotation = Annotated[annotation, Field(**(bounds if {"ge", "gt"} & set(bounds) else {"ge": 0} | bounds))]
    return annotation | None if field.get("null") else annotation


def value_problems(settings: dict[str, Any], skip: Container[str], path: KeyPath = ()) -> Iterator[Problem]:
    """Yield values of a JSON (or of its section at `path`) of a wrong type or outside their range, and remove them.

    Other rules check the dotted paths in `skip`.
    """
    for name, value in list(settings.items()):
        here = ".".join((*path, name))
        if value is None and (here in skip or here in sections()):
            del settings[name]
        elif value == AUTO or here in skip:
            continue
        elif here in sections():
            if isinstance(value, dict):
                yield from value_problems(value, skip, (*path, name))
            else:
                del settings[name]
                yield Problem(here, f"{show_value(value)}: expected a section")
        elif here in rules() and (reason := type_problem(value, rules()[here])):
            del settings[name]
            yield Problem(here, reason)


def type_problem(value: Any, annotation: Any) -> str | None:
    """Return what is wrong with a value of a type, or None."""
    try:
        TypeAdapter(annotation).validate_json(json.dumps(integral_floats_as_ints(value)), strict=True)
    except ValidationError:
        return f"{show_value(value)}: expected {describe_type(annotation)}"
    return None


def monitor_problems(settings: dict[str, Any]) -> Iterator[Problem]:
    """Yield DeepSpeed's monitors that are enabled; they know neither evaluations nor a resume."""
    for section, remedy in MONITORS.items():
        values = settings.get(section)
        if isinstance(values, dict) and values.get("enabled") is True:
            text = f"true, but DeepSpeed's monitors know neither evaluations nor a resume; {remedy}, and remove it here"
            yield Problem(f"{section}.enabled", text)
