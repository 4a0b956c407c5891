"""DeepSpeed's JSON and the recipe combined into one engine configuration, without importing DeepSpeed or torch.

The JSON holds engine settings (ZeRO stage, buckets, offload). Batch sizes, precision, optimizer and clipping come from
the recipe; the JSON may repeat them as "auto" or with the same value. Settings that DeepSpeed would ignore (a misspelt
key) or fail on later are refused here.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.installed import shipped_folder
from ctxlm_ds.recipe.deepspeed_rules import CURRICULUM, IGNORED, REFUSED, find_conflicts
from ctxlm_ds.recipe.deepspeed_values import AUTO, KeyPath, deepspeed_keys, monitor_problems, rules, value_problems
from ctxlm_ds.recipe.layout import batch_problems
from ctxlm_ds.recipe.problems import Problem, did_you_mean, nearest_name, raise_problems, show_value, text_problem
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import OptimizerSection
from ctxlm_ds.recipe.yaml_source import MAX_CHARACTERS, MAX_DEPTH
from ctxlm_ds.untrusted_json import read_text

SHIPPED_CONFIG_DIR = shipped_folder("ds_configs")
DEFAULT_CONFIG = "zero1"
NEVER_PRINT_STEPS = 2**31 - 1
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
KEPT_AUTO = (("pipeline", "stages"), ("data_types", "keep_in_fp32_modules"), ("expert_parallel",))
"""Settings whose value "auto" has a meaning in DeepSpeed."""
OF_SCHEDULE = ("total_num_steps", "warmup_num_steps")
OF_TRAINER = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
"""Settings that transformers' Trainer has, too."""
CLOSED_SECTIONS = ("aio", "comet", "csv_monitor", "pipeline", "tensorboard", "wandb")
"""Sections whose keys are those of the rules."""


class Owned(NamedTuple):
    """A value that the recipe decides."""

    setting: str
    """Dotted path of the setting in the recipe."""
    value: Any


def load_deepspeed_json(path_or_name: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON: a path, or the name of one in ds_configs/ (`zero2`).

    `${NAME}` and `${NAME:-default}` in a value are replaced by an environment variable.

    Raises:
        ConfigError: no such file, not JSON, a duplicate key, or a variable that is not set.
    """
    path = find_deepspeed_json(path_or_name)
    text = read_text(path, ConfigError, MAX_CHARACTERS)
    try:
        data = json.loads(text, object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested deeper than {MAX_DEPTH} levels") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected an object of DeepSpeed settings, not {show_value(data)}")
    expanded: dict[str, Any] = _expand_variables(data, str(path))
    return expanded


def _expand_variables(value: Any, where: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise ConfigError(f"{where[:200]}: nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {
            _expand_variables(name, where): _expand_variables(item, f"{where}: {name}", depth + 1)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_expand_variables(item, where, depth + 1) for item in value]
    if not isinstance(value, str):
        return value
    if reason := text_problem(value):
        raise ConfigError(f"{ascii(where)[1:-1]}: {reason}")

    def replace(match: re.Match[str]) -> str:
        name, default = match.groups()
        found = os.environ.get(name) or default
        if found is None:
            raise ConfigError(f"{where} is {value}, but the environment has no {name}; export {name}=VALUE")
        return found

    return VARIABLE.sub(replace, value)


def find_deepspeed_json(path_or_name: str | Path) -> Path:
    """Return the file of a DeepSpeed JSON; a bare name is searched in ./ds_configs and in that of the project.

    Raises:
        ConfigError: there is none; the message suggests the nearest name.
    """
    if reason := text_problem(str(path_or_name)):
        raise ConfigError(f"DeepSpeed config {reason}")
    path = Path(path_or_name)
    if path.is_file():
        return path
    folders = [Path("ds_configs"), SHIPPED_CONFIG_DIR]
    if len(path.parts) == 1:
        for folder in folders:
            candidate = folder / f"{path.name.removesuffix('.json')}.json"
            if candidate.is_file():
                return candidate
    names = sorted({file.stem for folder in folders for file in folder.glob("*.json")})
    hint = did_you_mean(path.stem, names) or "."
    raise ConfigError(f"DeepSpeed config {path_or_name}: no such file{hint} Known names: {', '.join(names) or 'none'}")


def build_deepspeed_config(
    config: RunConfig, user_json: dict[str, Any], world_size: int, source: str = "the DeepSpeed JSON"
) -> dict[str, Any]:
    """Return the engine configuration: the user's JSON with the values of the recipe.

    Args:
        config: a checked recipe.
        user_json: result of `load_deepspeed_json`; not changed.
        world_size: number of ranks.
        source: file of the JSON, for messages.

    Raises:
        ConfigError: lists every unknown key, wrong value, conflict with the recipe, and combination that DeepSpeed
            would fail on.
    """
    result = copy.deepcopy(user_json)
    problems = list(_unknown_keys(result, ()))
    if "bfloat16" in result:
        result.setdefault("bf16", result.pop("bfloat16"))
    owned = _owned_values(config, world_size)
    problems += value_problems(result, {*REFUSED, *owned, "scheduler"})
    for path, value in owned.items():
        problems += _settle(result, path, value)
    problems += _settle_optimizer(result, config.optimizer)
    if result.pop("scheduler", AUTO) != AUTO:
        problems.append(Problem("scheduler", "the recipe's schedule section sets the learning rate; remove it here"))
    known = {problem.path for problem in problems}
    problems += [one for one in find_conflicts(config, result, world_size) if one.path not in known]
    problems += batch_problems(config.training, config.parallel, world_size)
    problems += monitor_problems(result)
    zero = result.get("zero_optimization")
    if isinstance(zero, dict):
        zero |= {name: size for name, size in bucket_hints(config.model.width).items() if zero.get(name) == AUTO}
    problems += _settle_autos(result, ())
    raise_problems(f"{source} with recipe {config.name}", problems)
    for name in IGNORED:
        result.pop(name, None)
    _separate_runs(result, config)
    # DeepSpeed's throughput timer synchronises the device twice per micro-batch; the run has its own metrics.
    defaults = {
        "steps_per_print": NEVER_PRINT_STEPS, "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    return result | {name: value for name, value in defaults.items() if name not in result}


def deepspeed_for_trainer(path_or_name: str | Path) -> dict[str, Any]:
    """Read a JSON for transformers' Trainer, which replaces "auto"; what the JSON lacks is added as "auto".

    Without these settings, DeepSpeed would refuse the batch sizes and leave gradients unclipped.

    Raises:
        ConfigError: the file cannot be read, or DeepSpeed knows no such key or value.
    """
    result = load_deepspeed_json(path_or_name)
    sections = ("bf16", "fp16", "optimizer", "scheduler", "zero_optimization")
    result = {key: value for key, value in result.items() if key not in sections or value not in (AUTO, None)}
    problems = [*_unknown_keys(result, ()), *value_problems(result, {*REFUSED, *OF_TRAINER, "optimizer", "scheduler"})]
    for key in ("optimizer", "scheduler"):
        if not isinstance(section := result.get(key, {}), dict) or not isinstance(section.get("params", {}), dict):
            problems.append(Problem(key, 'expected {"type": …, "params": {…}}; leave it out'))
        elif any(value != AUTO for name, value in section.get("params", {}).items() if name in OF_SCHEDULE):
            problems.append(Problem(f"{key}.params", f'the command sets {" and ".join(OF_SCHEDULE)}; write "auto"'))
    raise_problems(f"--deepspeed {path_or_name}", problems)
    return {**dict.fromkeys(OF_TRAINER, AUTO), "bf16": {"enabled": AUTO}, "steps_per_print": NEVER_PRINT_STEPS} | result


def _owned_values(config: RunConfig, world_size: int) -> dict[str, Owned]:
    training = config.training
    ranks = config.parallel.data_parallel_size(world_size)
    accumulation = training.global_batch_size // (training.micro_batch_size * ranks)
    return {
        "train_batch_size": Owned("training.global_batch_size", training.global_batch_size),
        "train_micro_batch_size_per_gpu": Owned("training.micro_batch_size", training.micro_batch_size),
        "gradient_accumulation_steps": Owned(
            "training.global_batch_size / (training.micro_batch_size x data-parallel ranks)", accumulation
        ),
        "gradient_clipping": Owned("optimizer.gradient_clipping", config.optimizer.gradient_clipping),
        "bf16.enabled": Owned("training.precision", training.precision == "bf16"),
        "fp16.enabled": Owned("training.precision", training.precision == "fp16"),
        "fp16.initial_scale_power": Owned("training.initial_loss_scale_power", training.initial_loss_scale_power),
        "data_types.grad_accum_dtype": Owned("training.grad_accum_dtype", training.grad_accum_dtype),
    }


def _settle(result: dict[str, Any], path: str, owned: Owned) -> Iterator[Problem]:
    """Write an owned value; the JSON's value must be absent, "auto" or equal."""
    holder, (*above, name) = result, path.split(".")
    for section in above:
        if holder.get(section, AUTO) == AUTO:
            holder[section] = {}
        holder = holder[section]
    stood = holder.get(name, AUTO)
    if stood not in (AUTO, None) and stood != owned.value:
        yield Problem(
            path,
            f"{show_value(stood)} here, but {show_value(owned.value)} in the recipe ({owned.setting}); "
            'write "auto" here, or change the recipe',
        )
    holder[name] = owned.value


def _settle_optimizer(result: dict[str, Any], optimizer: OptimizerSection) -> Iterator[Problem]:
    """Hand over the optimizer section, or check that it repeats the recipe and remove it."""
    if optimizer.handed_over:
        yield from optimizer.hand_over(result)
        return
    if (section := result.get("optimizer", AUTO)) != AUTO:
        yield from _compare_optimizer(result, section, optimizer)
    result.pop("optimizer", None)


def _compare_optimizer(
    result: dict[str, Any], section: dict[str, Any], optimizer: OptimizerSection
) -> Iterator[Problem]:
    hand_over = "or set optimizer.name to from_ds_config to use this section"
    kind = str(section.get("type", AUTO))
    if kind.lower() not in (AUTO, optimizer.name, *optimizer.json_types):
        text = f"{kind} here, but {optimizer.name} in the recipe (optimizer.name); change one, {hand_over}"
        yield Problem("optimizer.type", text)
        return
    params, values = section.get("params", {}), optimizer.json_values()
    for key, stood in list(params.items()) if isinstance(params, dict) else ():
        if key in values:
            owned = Owned(f"optimizer.{optimizer.json_params[key]}", values[key])
            yield from _settle(result, f"optimizer.params.{key}", owned)
        elif stood != AUTO:
            text = f"{show_value(stood)}: the recipe's optimizer has no such setting; remove it here, {hand_over}"
            yield Problem(f"optimizer.params.{key}", text)


def bucket_hints(width: int | None) -> dict[str, int]:
    """Return ZeRO's sizes for "auto" from the model's width, as Hugging Face's integration chooses them."""
    if width is None:
        return {}
    return {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }


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


def _separate_runs(result: dict[str, Any], config: RunConfig) -> None:
    """Give each run directory a separate folder on the NVMe disk, because DeepSpeed names its files by rank only."""
    run_dir = os.path.abspath(config.directory)
    name = f"{config.name}-{hashlib.sha256(run_dir.encode()).hexdigest()[:8]}"
    for part in ("offload_optimizer", "offload_param"):
        section = result.get("zero_optimization", {}).get(part)
        if isinstance(section, dict) and section.get("device") == "nvme":
            section["nvme_path"] = os.path.join(section["nvme_path"], name)


def _unknown_keys(section: dict[str, Any], path: KeyPath) -> Iterator[Problem]:
    """Yield keys that DeepSpeed does not read, and remove them."""
    keys, known = deepspeed_keys(), _known_keys(path)
    for name, value in list(section.items()):
        here = (*path, name)
        if here in keys.removed:
            reason = CURRICULUM if name == "curriculum_learning" else keys.removed[here]
        elif known is not None and name not in known:
            near = nearest_name(name, known)
            hint = f"; did you mean {'.'.join((*path, near))}?" if near else "; remove it"
            reason = f"DeepSpeed reads no such key (value {show_value(value)}){hint}"
        else:
            if isinstance(value, dict):
                yield from _unknown_keys(value, here)
            continue
        del section[name]
        yield Problem(".".join(here), reason)


def _known_keys(path: KeyPath) -> frozenset[str] | None:
    if not path:
        return deepspeed_keys().top_level
    if path[0] in CLOSED_SECTIONS:
        return frozenset(other.split(".")[1] for other in (*rules(), *REFUSED) if other.startswith(f"{path[0]}."))
    return deepspeed_keys().nested.get(path)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name}: expected a finite number")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)}: written twice; keep one")
    return dict(pairs)
