"""DeepSpeed's JSON: read, and combined with the recipe into one engine configuration, without DeepSpeed or torch.

A file, also one for transformers' Trainer, is found by its path or name, environment variables are replaced, and
duplicate keys are refused.

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.installed import shipped_folder
from ctxlm_ds.recipe.deepspeed_rules import AUTO, IGNORED, REFUSED, find_conflicts, setting_problems
from ctxlm_ds.recipe.layout import batch_problems
from ctxlm_ds.recipe.problems import FromEnvironment, Problem, did_you_mean, raise_problems, show_value, text_problem
from ctxlm_ds.recipe.schema import RunConfig, TrainingConfig
from ctxlm_ds.recipe.sections import OptimizerSection
from ctxlm_ds.recipe.yaml_source import MAX_CHARACTERS, MAX_DEPTH
from ctxlm_ds.untrusted_json import read_text, refuse_constant

SHIPPED_CONFIG_DIR = shipped_folder("ds_configs")
DEFAULT_CONFIG = "zero1"
NEVER_PRINT_STEPS = 2**31 - 1
OF_SCHEDULE = ("total_num_steps", "warmup_num_steps")
OF_TRAINER = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
"""Settings that transformers' Trainer has, too."""
DEEPSPEED_BUCKET = 500_000_000
"""Elements of DeepSpeed 0.19.8's default bucket; stages 0 and 1 in 16 bits always use it."""
OFFLOADS = ("offload_optimizer", "offload_param")
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
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


@dataclass(frozen=True)
class ZeroSettings:
    """The values of a DeepSpeed JSON's section `zero_optimization` that this project reads; sizes in elements."""

    stage: int
    overlap_comm: bool
    reduce_bucket: int
    prefetch_bucket: int
    persistence_threshold: int
    max_reuse_distance: int
    offload_optimizer: bool
    offload_parameters: bool
    nvme_paths: Mapping[str, str]
    """Name of a section that offloads to NVMe -> its folder."""

    @classmethod
    def of_json(cls, settings: Mapping[str, Any], width: int | None = None) -> ZeroSettings:
        """Read a JSON; "auto" sizes follow from the model's width."""
        zero = settings.get("zero_optimization") or {}
        stage = int(zero.get("stage", 0))
        sizes = {name: value for name, value in zero.items() if value != AUTO}
        sizes |= {name: size for name, size in bucket_hints(width).items() if zero.get(name) == AUTO}
        sections = {name: zero.get(name) or {} for name in OFFLOADS}
        offloads = [section.get("device", "none") not in ("none", None) for section in sections.values()]
        return cls(
            stage=stage,
            overlap_comm=bool(zero.get("overlap_comm", stage == 3)),
            reduce_bucket=int(sizes.get("reduce_bucket_size", DEEPSPEED_BUCKET)),
            prefetch_bucket=int(sizes.get("stage3_prefetch_bucket_size", 50_000_000)),
            persistence_threshold=int(sizes.get("stage3_param_persistence_threshold", 100_000)),
            max_reuse_distance=int(sizes.get("stage3_max_reuse_distance", 1_000_000_000)),
            offload_optimizer=offloads[0],
            offload_parameters=offloads[1],
            nvme_paths={name: str(s.get("nvme_path")) for name, s in sections.items() if s.get("device") == "nvme"},
        )


def bucket_hints(width: int | None) -> dict[str, int]:
    """Return ZeRO's sizes for "auto" from the model's width, as Hugging Face's integration chooses them."""
    if width is None:
        return {}
    return {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }


def load_deepspeed_json(path_or_name: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON: a path, or the name of one in ds_configs/ (`zero2`); ConfigError if that is impossible.

    `${NAME}` and `${NAME:-default}` in a value are replaced by an environment variable.
    """
    path = find_deepspeed_json(path_or_name)
    text = read_text(path, ConfigError, MAX_CHARACTERS)
    try:
        data = json.loads(text, object_pairs_hook=_refuse_duplicates, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested deeper than {MAX_DEPTH} levels") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected an object of DeepSpeed settings, not {show_value(data)}")
    return _expand_variables(data, str(path))


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


def _checked(text: str, where: str) -> str:
    if reason := text_problem(text):
        raise ConfigError(f"{ascii(where)[1:-1]}: {reason}")
    return text


def _expand_variables(value: Any, where: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise ConfigError(f"{where[:200]}: nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {
            _checked(name, where): _expand_variables(item, f"{where}: {name}", depth + 1)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_expand_variables(item, where, depth + 1) for item in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name, default = match.groups()
        found = os.environ.get(name) or default
        if found is None:
            raise ConfigError(f"{where} is {value}, but the environment has no {name}; export {name}=VALUE")
        return found

    expanded = FromEnvironment(VARIABLE.sub(replace, _checked(value, where)))
    expanded.written = value
    return expanded if expanded != value else value


def plain_json(value: Any) -> Any:
    """Return settings with plain texts in place of those of the environment."""
    if isinstance(value, dict):
        return {name: plain_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [plain_json(item) for item in value]
    return str(value) if isinstance(value, FromEnvironment) else value


def find_deepspeed_json(path_or_name: str | Path) -> Path:
    """Return the file of a DeepSpeed JSON; a bare name is searched in ./ds_configs and in that of the project.

    Raises ConfigError with the nearest name if there is none.
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


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)}: written twice; keep one")
    return dict(pairs)
