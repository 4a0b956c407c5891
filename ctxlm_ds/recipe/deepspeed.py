"""DeepSpeed's JSON and the recipe made into one engine configuration.

The JSON holds engine knobs (ZeRO stage, buckets, offload); batch, precision, optimizer and clipping come from the
recipe. A key that the recipe owns may stand in the JSON as "auto" or with the same value. What DeepSpeed would ignore
(a misspelt top-level key) or fail on later is refused here, without importing DeepSpeed or torch. The keys that it
reads are in deepspeed_keys.json, made from the pinned release (tests/deepspeed_source.py) and compared with the
installed one by a test.
In: RunConfig, the JSON, the world size. Out: the dict for deepspeed.initialize. Not here: the engine.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.deepspeed_rules import find_conflicts
from ctxlm_ds.recipe.layout import batch_problems, data_parallel_size
from ctxlm_ds.recipe.problems import Problem, did_you_mean, nearest_name, raise_problems, show_value
from ctxlm_ds.recipe.schema import RunConfig

KeyPath = tuple[str, ...]
KEYS_FILE = Path(__file__).with_name("deepspeed_keys.json")


@dataclass(frozen=True, slots=True)
class DeepSpeedKeys:
    """What DeepSpeed reads."""

    top_level: frozenset[str]
    nested: dict[KeyPath, frozenset[str]]
    """Keys of each section whose keys are known in full, by its path."""
    removed: dict[KeyPath, str]
    """Keys of older releases that DeepSpeed refuses, with its reason."""


@cache
def deepspeed_keys() -> DeepSpeedKeys:
    """Return the keys of the pinned DeepSpeed."""
    values = json.loads(KEYS_FILE.read_text(encoding="utf-8"))
    return DeepSpeedKeys(
        frozenset(values["top_level"]),
        {tuple(path.split(".")): frozenset(names) for path, names in values["nested"].items()},
        {tuple(path.split(".")): text for path, text in values["removed"].items()},
    )


CHECKOUT_CONFIG_DIR = Path(__file__).resolve().parents[2] / "ds_configs"
DEFAULT_CONFIG = "zero1"
NEVER_PRINT_STEPS = 2**31 - 1
AUTO = "auto"
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
KEPT_AUTO = (("pipeline", "stages"), ("data_types", "keep_in_fp32_modules"), ("expert_parallel",))
"""Where "auto" is a word of DeepSpeed's own."""


@dataclass(frozen=True, slots=True)
class Owned:
    """A value that the recipe decides."""

    setting: str
    """Dotted path of the recipe's setting, for messages."""
    value: Any


def load_deepspeed_json(path_or_name: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON: a path, or the name of one in ds_configs/ (`zero2`).

    `${NAME}` and `${NAME:-default}` in a value stand for an environment variable.

    Raises:
        ConfigError: no such file, not JSON, a key written twice, or a variable that is not set.
    """
    path = find_deepspeed_json(path_or_name)
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_refuse_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected an object of DeepSpeed settings, not {show_value(data)}")
    expanded: dict[str, Any] = _expand_variables(data, str(path))
    return expanded


def _expand_variables(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        return {name: _expand_variables(item, f"{where}: {name}") for name, item in value.items()}
    if isinstance(value, list):
        return [_expand_variables(item, where) for item in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name, default = match.groups()
        found = os.environ.get(name) or default
        if found is None:
            raise ConfigError(f"{where} is {value}, but the environment has no {name}; export {name}=VALUE")
        return found

    return VARIABLE.sub(replace, value)


def find_deepspeed_json(path_or_name: str | Path) -> Path:
    """The file of a DeepSpeed JSON; a bare name is looked up in ./ds_configs and in the project's.

    Raises:
        ConfigError: there is none; the message has the nearest name.
    """
    path = Path(path_or_name)
    if path.is_file():
        return path
    folders = [Path("ds_configs"), CHECKOUT_CONFIG_DIR]
    is_name = len(path.parts) == 1
    if is_name:
        for folder in folders:
            candidate = folder / f"{path.name.removesuffix('.json')}.json"
            if candidate.is_file():
                return candidate
    names = sorted({file.stem for folder in folders for file in folder.glob("*.json")})
    hint = did_you_mean(path.stem, names)
    raise ConfigError(f"DeepSpeed config {path_or_name}: no such file{hint} Known names: {', '.join(names) or 'none'}")


def build_deepspeed_config(
    config: RunConfig, user_json: dict[str, Any], world_size: int, source: str = "the DeepSpeed JSON"
) -> dict[str, Any]:
    """The engine configuration: the user's JSON with the recipe's values filled in.

    Args:
        config: a checked recipe.
        user_json: what `load_deepspeed_json` gave; left unchanged.
        world_size: number of ranks.
        source: the JSON's file, for messages.

    Raises:
        ConfigError: lists every unknown key, every conflict with the recipe and every combination that DeepSpeed
            would fail on, with both values.
    """
    problems = list(_unknown_keys(user_json, ()))
    result = _without_unknown(user_json, problems)
    if "bfloat16" in result:
        result.setdefault("bf16", result.pop("bfloat16"))
    owned = _owned_values(config, world_size)
    for path, value in owned.items():
        problems += _settle(result, path, value)
    problems += _settle_optimizer(result, config)
    if result.pop("scheduler", AUTO) != AUTO:
        problems.append(Problem("scheduler", "the recipe's schedule section sets the learning rate; remove it here"))
    problems += [*find_conflicts(config, result), *batch_problems(config, world_size)]
    _fill_hints(result, config)
    problems += _settle_autos(result, ())
    raise_problems(f"{source} with recipe {config.name}", problems)
    _separate_runs(result, config)
    result.setdefault("steps_per_print", NEVER_PRINT_STEPS)
    result.setdefault("wall_clock_breakdown", False)
    # It would synchronise the device twice a micro-batch for a figure that the run's own metrics have.
    result.setdefault("timers", {"throughput": {"enabled": False}})
    result.setdefault("zero_allow_untested_optimizer", True)
    result.setdefault("zero_force_ds_cpu_optimizer", False)
    return result


def _owned_values(config: RunConfig, world_size: int) -> dict[tuple[str, ...], Owned]:
    training = config.training
    accumulation = training.global_batch_size // (training.micro_batch_size * data_parallel_size(config, world_size))
    return {
        ("train_batch_size",): Owned("training.global_batch_size", training.global_batch_size),
        ("train_micro_batch_size_per_gpu",): Owned("training.micro_batch_size", training.micro_batch_size),
        ("gradient_accumulation_steps",): Owned(
            "training.global_batch_size / (training.micro_batch_size x data-parallel ranks)", accumulation
        ),
        ("gradient_clipping",): Owned("optimizer.gradient_clipping", config.optimizer.gradient_clipping),
        ("bf16", "enabled"): Owned("training.precision", training.precision == "bf16"),
        ("fp16", "enabled"): Owned("training.precision", training.precision == "fp16"),
        ("fp16", "initial_scale_power"): Owned("training.initial_loss_scale_power", training.initial_loss_scale_power),
        ("data_types", "grad_accum_dtype"): Owned("training.grad_accum_dtype", training.grad_accum_dtype),
    }


def _settle(result: dict[str, Any], path: tuple[str, ...], owned: Owned) -> Iterator[Problem]:
    """Write an owned value; what stood there must be absent, "auto" or equal."""
    holder = result
    for name in path[:-1]:
        inner = holder.setdefault(name, {})
        if not isinstance(inner, dict):
            yield Problem(".".join(path[:-1]), f"{show_value(inner)}: expected a section")
            return
        holder = inner
    stood = holder.get(path[-1], AUTO)
    if stood not in (AUTO, None) and stood != owned.value:
        yield Problem(
            ".".join(path),
            f"{show_value(stood)} here, but {show_value(owned.value)} in the recipe ({owned.setting}); "
            'write "auto" here, or change the recipe',
        )
    holder[path[-1]] = owned.value


def _settle_optimizer(result: dict[str, Any], config: RunConfig) -> Iterator[Problem]:
    """The optimizer section: handed over whole, or at most a repetition of the recipe's."""
    section = result.get("optimizer", AUTO)
    values = {
        "lr": Owned("optimizer.learning_rate", config.optimizer.learning_rate),
        "betas": Owned("optimizer.betas", list(config.optimizer.betas)),
        "eps": Owned("optimizer.eps", config.optimizer.eps),
        "weight_decay": Owned("optimizer.weight_decay", config.optimizer.weight_decay),
    }
    if config.optimizer.name == "from_ds_config":
        yield from _hand_over_optimizer(section, values)
        return
    result.pop("optimizer", None)
    if section == AUTO:
        return
    if not isinstance(section, dict):
        yield Problem("optimizer", f"{show_value(section)}: expected a section with type and params")
        return
    kind = str(section.get("type", AUTO))
    same_kind = {"adamw": ("auto", "adamw", "adam"), "lamb": ("auto", "lamb")}[config.optimizer.name]
    hand_over = "or set optimizer.name to from_ds_config to take this section whole"
    if kind.lower() not in same_kind:
        text = f"{kind} here, but {config.optimizer.name} in the recipe (optimizer.name); change one, {hand_over}"
        yield Problem("optimizer.type", text)
        return
    params = section.get("params", {})
    for name, stood in params.items() if isinstance(params, dict) else ():
        if stood == AUTO:
            continue
        if name not in values:
            text = f"{show_value(stood)}: the recipe's optimizer has no such setting; remove it here, {hand_over}"
            yield Problem(f"optimizer.params.{name}", text)
        elif stood != values[name].value:
            yield Problem(
                f"optimizer.params.{name}",
                f"{show_value(stood)} here, but {show_value(values[name].value)} in the recipe "
                f'({values[name].setting}); write "auto" here, or change the recipe',
            )


def _hand_over_optimizer(section: Any, values: dict[str, Owned]) -> Iterator[Problem]:
    """Fill what the user left to the recipe. The learning rate stays the recipe's: its schedule writes it each step."""
    if not isinstance(section, dict) or section.get("type", AUTO) == AUTO:
        yield Problem(
            "optimizer",
            "missing, or without a type, while the recipe's optimizer.name from_ds_config takes this section whole; "
            'add {"type": …, "params": {…}}, or set optimizer.name to adamw or lamb',
        )
        return
    params = section.setdefault("params", {})
    yield from _settle(params, ("lr",), values["lr"])
    for name, owned in values.items():
        if params.get(name) == AUTO:
            params[name] = owned.value


def _fill_hints(result: dict[str, Any], config: RunConfig) -> None:
    """Fill ZeRO-3's bucket sizes left "auto" from the model's width, by the rule of Hugging Face's integration."""
    zero, hidden = result.get("zero_optimization"), config.model.width
    if not isinstance(zero, dict) or hidden is None:
        return
    hints = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    for name, value in hints.items():
        if zero.get(name) == AUTO:
            zero[name] = value


def _settle_autos(section: dict[str, Any], path: tuple[str, ...]) -> Iterator[Problem]:
    """Drop every other "auto", which leaves DeepSpeed's default; an optimizer's own setting has none to leave."""
    for name, value in list(section.items()):
        here = (*path, name)
        if any(here[: len(kept)] == kept for kept in KEPT_AUTO):
            continue
        if isinstance(value, dict):
            yield from _settle_autos(value, here)
        elif value == AUTO:
            del section[name]
            if here[0] == "optimizer":
                yield Problem(".".join(here), 'the recipe has no value to put for "auto"; write one here')


def _separate_runs(result: dict[str, Any], config: RunConfig) -> None:
    """A folder of its own on the NVMe disk for each run directory: DeepSpeed's files are named by rank alone."""
    run_dir = os.path.abspath(config.run_dir or os.path.join("runs", config.name))
    name = f"{config.name}-{hashlib.sha256(run_dir.encode()).hexdigest()[:8]}"
    for part in ("offload_optimizer", "offload_param"):
        section = result.get("zero_optimization", {}).get(part)
        if isinstance(section, dict) and section.get("device") == "nvme":
            section["nvme_path"] = os.path.join(section["nvme_path"], name)


def _unknown_keys(section: dict[str, Any], path: tuple[str, ...]) -> Iterator[Problem]:
    keys = deepspeed_keys()
    known = keys.nested.get(path) if path else keys.top_level
    for name, value in section.items():
        here = (*path, name)
        if here in keys.removed or (not path and name == "curriculum_learning"):
            yield Problem(".".join(here), _removed_reason(name, keys.removed.get(here, "")))
        elif known is not None and name not in known:
            near = nearest_name(name, known)
            hint = f"; did you mean {'.'.join((*path, near))}?" if near else "; remove it"
            yield Problem(".".join(here), f"DeepSpeed reads no such key (value {show_value(value)}){hint}")
        elif isinstance(value, dict):
            yield from _unknown_keys(value, here)


def _removed_reason(name: str, reason: str) -> str:
    if name == "curriculum_learning":
        return (
            "a curriculum over sequence length changes the shape of the batches, which ctxlm_ds keeps constant "
            "(compiled kernels, exact losses and resume rest on it); train short rows in a run of their own first and "
            "let the next one start from it with initialize_from"
        )
    return reason


def _without_unknown(section: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    result = copy.deepcopy(section)
    for problem in problems:
        *above, name = problem.path.split(".")
        holder: Any = result
        for part in above:
            holder = holder.get(part, {})
        holder.pop(name, None)
    return result


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)}: written twice; keep one")
    return dict(pairs)
