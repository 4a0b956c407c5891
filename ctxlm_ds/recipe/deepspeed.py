"""DeepSpeed's JSON combined with the recipe into one engine configuration, without DeepSpeed or torch.

The JSON holds engine settings (ZeRO stage, buckets, offload). Batch sizes, precision, optimizer and clipping come from
the recipe; the JSON may repeat them as "auto" or with the same value. Settings that DeepSpeed would ignore (a misspelt
key) or fail on later are refused here.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ctxlm_ds.recipe.deepspeed_rules import AUTO, IGNORED, REFUSED, find_conflicts, setting_problems
from ctxlm_ds.recipe.json_source import load_deepspeed_json, plain_json
from ctxlm_ds.recipe.layout import batch_problems
from ctxlm_ds.recipe.problems import Problem, raise_problems, show_value
from ctxlm_ds.recipe.schema import RunConfig, TrainingConfig
from ctxlm_ds.recipe.sections import OptimizerSection
from ctxlm_ds.recipe.zero import OFFLOADS, bucket_hints

DEFAULT_CONFIG = "zero1"
NEVER_PRINT_STEPS = 2**31 - 1
OF_SCHEDULE = ("total_num_steps", "warmup_num_steps")
OF_TRAINER = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
"""Settings that transformers' Trainer has, too."""
KEPT_AUTO = (("pipeline", "stages"), ("data_types", "keep_in_fp32_modules"), ("expert_parallel",))
"""Settings whose value "auto" has a meaning in DeepSpeed."""


def build_deepspeed_config(
    config: RunConfig, user_json: dict[str, Any], world_size: int, source: str = "the DeepSpeed JSON"
) -> dict[str, Any]:
    """Return the engine configuration: the user's JSON, which is not changed, with the values of the checked recipe.

    Raises ConfigError with every unknown key, wrong value, conflict with the recipe, and combination that DeepSpeed
    would fail on; messages name `source`, the file of the JSON.
    """
    result = copy.deepcopy(user_json)
    if "bfloat16" in result:
        result.setdefault("bf16", result.pop("bfloat16"))
    ranks = config.parallel.data_parallel_size(world_size)
    owned = _owned_values(config.training, config.optimizer.gradient_clipping, ranks)
    problems = list(setting_problems(result, {*REFUSED, *owned, "scheduler"}))
    for path, (setting, value) in owned.items():
        problems += _settle(result, path, setting, value)
    problems += _settle_optimizer(result, config.optimizer)
    if result.pop("scheduler", AUTO) != AUTO:
        problems.append(Problem("scheduler", "the recipe's schedule section sets the learning rate; remove it here"))
    known = {problem.path for problem in problems}
    sections = config.training, config.parallel, config.optimizer, config.teacher
    problems += [one for one in find_conflicts(*sections, result, world_size) if one.path not in known]
    problems += batch_problems(config.training, config.parallel, world_size)
    zero = result.get("zero_optimization")
    if isinstance(zero, dict):
        zero |= {name: size for name, size in bucket_hints(config.model.width).items() if zero.get(name) == AUTO}
    problems += _settle_autos(result, ())
    raise_problems(f"{source} with recipe {config.name}", problems)
    for name in IGNORED:
        result.pop(name, None)
    _separate_runs(result, config.name, os.path.abspath(config.directory))
    # DeepSpeed's throughput timer synchronises the device twice per micro-batch; the run has its own metrics.
    defaults = {
        "steps_per_print": NEVER_PRINT_STEPS, "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    return defaults | plain_json(result)


def _owned_values(training: TrainingConfig, clipping: float, ranks: int) -> dict[str, tuple[str, Any]]:
    """Return the settings that the recipe decides, by their dotted path in the JSON: setting of the recipe, value."""
    accumulation = training.global_batch_size // (training.micro_batch_size * ranks)
    of_accumulation = "training.global_batch_size / (training.micro_batch_size x data-parallel ranks)"
    return {
        "train_batch_size": ("training.global_batch_size", training.global_batch_size),
        "train_micro_batch_size_per_gpu": ("training.micro_batch_size", training.micro_batch_size),
        "gradient_accumulation_steps": (of_accumulation, accumulation),
        "gradient_clipping": ("optimizer.gradient_clipping", clipping),
        "bf16.enabled": ("training.precision", training.precision == "bf16"),
        "fp16.enabled": ("training.precision", training.precision == "fp16"),
        "fp16.initial_scale_power": ("training.initial_loss_scale_power", training.initial_loss_scale_power),
        "data_types.grad_accum_dtype": ("training.grad_accum_dtype", training.grad_accum_dtype),
    }


def _settle(result: dict[str, Any], path: str, setting: str, value: Any) -> Iterator[Problem]:
    """Write a value that the recipe decides; the value of the JSON must be absent, "auto" or equal."""
    holder, (*above, name) = result, path.split(".")
    for section in above:
        if holder.get(section, AUTO) == AUTO:
            holder[section] = {}
        holder = holder[section]
    stood = holder.get(name, AUTO)
    if stood not in (AUTO, None) and stood != value:
        text = f"{show_value(stood)} here, but {show_value(value)} in the recipe ({setting})"
        yield Problem(path, f'{text}; write "auto" here, or change the recipe')
    holder[name] = value


def _settle_optimizer(result: dict[str, Any], optimizer: OptimizerSection) -> Iterator[Problem]:
    """Hand over the optimizer section, or check that it repeats the recipe and remove it."""
    if optimizer.handed_over:
        yield from optimizer.hand_over(result)
        return
    section = result.pop("optimizer", AUTO)
    section = {} if section == AUTO else section
    hand_over = "or set optimizer.name to from_ds_config to use this section"
    kind = section.get("type", AUTO)
    if str(kind).lower() not in (AUTO, optimizer.name, *optimizer.json_types):
        text = f"{show_value(kind)} here, but {optimizer.name} in the recipe (optimizer.name); change one, {hand_over}"
        yield Problem("optimizer.type", text)
        return
    params, values = section.get("params", {}), optimizer.json_values()
    for key, stood in list(params.items()) if isinstance(params, dict) else ():
        if key in values:
            setting = f"optimizer.{optimizer.json_params[key]}"
            yield from _settle({"optimizer": section}, f"optimizer.params.{key}", setting, values[key])
        elif stood != AUTO:
            text = f"{show_value(stood)}: the recipe's optimizer has no such setting; remove it here, {hand_over}"
            yield Problem(f"optimizer.params.{key}", text)


def _settle_autos(section: dict[str, Any], path: tuple[str, ...]) -> Iterator[Problem]:
    """Remove every other "auto", which leaves DeepSpeed's default; parameters of an optimizer need a value."""
    for name, value in list(section.items()):
        here = (*path, name)
        if any(here[: len(kept)] == kept for kept in KEPT_AUTO):
            continue
        if isinstance(value, dict):
            yield from _settle_autos(value, here)
        elif value == AUTO:
            del section[name]
            if here[0] == "optimizer":
                yield Problem(".".join(here), 'the recipe has no value for "auto"; write one here')


def _separate_runs(result: dict[str, Any], name: str, run_dir: str) -> None:
    """Give each run directory a separate folder on the NVMe disk, because DeepSpeed names its files by rank only."""
    name = f"{name}-{hashlib.sha256(run_dir.encode()).hexdigest()[:8]}"
    for part in OFFLOADS:
        section = result.get("zero_optimization", {}).get(part)
        if isinstance(section, dict) and section.get("device") == "nvme":
            section["nvme_path"] = os.path.join(section["nvme_path"], name)


def deepspeed_for_trainer(path_or_name: str | Path) -> dict[str, Any]:
    """Read a JSON for transformers' Trainer, which replaces "auto"; what the JSON lacks is added as "auto".

    Without these settings, DeepSpeed would refuse the batch sizes and leave gradients unclipped. Raises ConfigError if
    the file cannot be read, or DeepSpeed knows no such key or value.
    """
    result = load_deepspeed_json(path_or_name)
    sections = ("bf16", "fp16", "optimizer", "scheduler", "zero_optimization")
    result = {key: value for key, value in result.items() if key not in sections or value not in (AUTO, None)}
    problems = list(setting_problems(result, {*REFUSED, *OF_TRAINER, "optimizer", "scheduler"}))
    for key in ("optimizer", "scheduler"):
        if not isinstance(section := result.get(key, {}), dict) or not isinstance(section.get("params", {}), dict):
            problems.append(Problem(key, 'expected {"type": …, "params": {…}}; leave it out'))
        elif any(value != AUTO for name, value in section.get("params", {}).items() if name in OF_SCHEDULE):
            problems.append(Problem(f"{key}.params", f'the command sets {" and ".join(OF_SCHEDULE)}; write "auto"'))
    raise_problems(f"--deepspeed {path_or_name}", problems)
    defaults = {**dict.fromkeys(OF_TRAINER, AUTO), "bf16": {"enabled": AUTO}, "steps_per_print": NEVER_PRINT_STEPS}
    return defaults | plain_json(result)
