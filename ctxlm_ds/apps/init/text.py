"""Write settings as a recipe with a comment after each, and prove that it loads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.init.translate import Setting
from ctxlm_ds.atomic import write_text
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.problems import Problem, ProblemsError, raise_problems
from ctxlm_ds.recipe.schema import RunConfig

_COMMENT_COLUMN = 40
_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*")
_RESERVED = {"true", "false", "null", "~", ".inf", ".nan"}


def recipe_text(head: Sequence[str], settings: Mapping[str, Setting]) -> str:
    """Return a recipe: comment lines, then sections in the schema's order, each value with its source."""
    lines = [f"# {line}".rstrip() for line in head]
    order = ["extends", *RunConfig.model_fields]
    names = {key.partition(".")[0] for key in settings}
    for name in sorted(names, key=order.index):
        if name in settings:
            lines.append(_line(name, settings[name], ""))
            continue
        lines.append(f"{name}:")
        inside = {key.partition(".")[2]: one for key, one in settings.items() if key.startswith(f"{name}.")}
        lines += [_line(key, one, "  ") for key, one in sorted(inside.items(), key=lambda item: _rank(name, item[0]))]
    return "\n".join(lines) + "\n"


def _rank(section: str, key: str) -> tuple[int, int]:
    """Return the place of a setting: what names an entry first, then the section's order."""
    annotation: Any = RunConfig.model_fields[section].annotation
    fields = list(getattr(annotation, "model_fields", {}))
    first = {"family", "name", "sample_format"}
    return (0 if key in first else 1, fields.index(key) if key in fields else len(fields))


def _line(key: str, setting: Setting, indent: str) -> str:
    if isinstance(setting.value, list) and any(isinstance(item, dict) for item in setting.value):
        items = [f"{indent}  - {_flow(item)}" for item in setting.value]
        return "\n".join([f"{indent}{key}:".ljust(_COMMENT_COLUMN) + _comment(setting), *items])
    return (f"{indent}{key}: {_flow(setting.value)}".ljust(_COMMENT_COLUMN) + _comment(setting)).rstrip()


def _comment(setting: Setting) -> str:
    return f"  # {setting.source}" if setting.source else ""


def _flow(value: Any) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value.lower() not in _RESERVED else json.dumps(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return json.dumps(value)


def write_recipe(path: Path, text: str, settings: Mapping[str, Setting] | None = None) -> RunConfig:
    """Write a recipe once it loads; return it. A problem names the source of its setting, not the line.

    Raises:
        ConfigError: the file exists, or the recipe is not valid; then nothing is written.
    """
    if path.exists():
        raise ConfigError(f"{path} exists; give another --output, or remove it")
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--output {path}: a recipe's name ends in .yaml")
    write_text(path, text)
    try:
        return load_config(path)
    except BaseException as error:
        path.unlink()
        if not isinstance(error, ConfigError) or settings is None or not isinstance(error, ProblemsError):
            raise
        title = f"{path} is not written, because the recipe would not be valid"
        raise_problems(title, [replace(one, where=_source(one, settings)) for one in error.problems])
        raise


def _source(problem: Problem, settings: Mapping[str, Setting]) -> str:
    """Return the source of the first setting that a problem is about."""
    for path in (problem.path, *problem.involves):
        source = next((one.source for key, one in settings.items() if re.match(rf"{re.escape(key)}\b", path)), "")
        if source:
            return source
    return ""
