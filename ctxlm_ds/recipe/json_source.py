"""DeepSpeed's JSON read from a file, with values of environment variables. Imports no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.installed import shipped_folder
from ctxlm_ds.recipe.problems import FromEnvironment, did_you_mean, show_value, text_problem
from ctxlm_ds.recipe.yaml_source import MAX_CHARACTERS
from ctxlm_ds.untrusted_json import parse_json, read_text

SHIPPED_CONFIG_DIR = shipped_folder("ds_configs")
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def load_deepspeed_json(path_or_name: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON: a path, or the name of one in ds_configs/ (`zero2`); ConfigError if that is impossible.

    `${NAME}` and `${NAME:-default}` in a value are replaced by an environment variable.
    """
    path = find_deepspeed_json(path_or_name)
    text = read_text(path, ConfigError, MAX_CHARACTERS)
    try:
        data = parse_json(text, finite=True, unique=True)
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected an object of DeepSpeed settings, not {show_value(data)}")
    return _expand_variables(data, str(path))


def _expand_variables(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        return {_checked(name, where): _expand_variables(item, f"{where}: {name}") for name, item in value.items()}
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

    expanded = FromEnvironment(VARIABLE.sub(replace, _checked(value, where)))
    expanded.written = value
    return expanded if expanded != value else value


def _checked(text: str, where: str) -> str:
    if reason := text_problem(text):
        raise ConfigError(f"{ascii(where)[1:-1]}: {reason}")
    return text


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
