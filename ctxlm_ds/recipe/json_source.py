"""Reader of DeepSpeed's JSON files, for runs and for transformers' Trainer, and their ZeRO settings.

A file is found by its path or name, environment variables are replaced, and duplicate keys are refused. No torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.installed import shipped_folder
from ctxlm_ds.recipe.deepspeed_rules import AUTO, REFUSED, setting_problems
from ctxlm_ds.recipe.problems import FromEnvironment, Problem, did_you_mean, raise_problems, show_value, text_problem
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
