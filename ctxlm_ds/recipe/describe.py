"""Schema in words: what a setting expects, which settings exist, and which one a misspelt name means."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ctxlm_ds.recipe.choices import CHOICES, KnownName, listed
from ctxlm_ds.recipe.problems import nearest_name, shortened
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.yaml_source import SettingPath

KNOWN_ELSEWHERE: dict[str, str] = json.loads(Path(__file__).with_name("names_elsewhere.json").read_text("utf-8"))
"""Each setting with its names in other systems."""


def dotted(path: SettingPath) -> str:
    """Join a path: `("data", "validation", 0, "path")` becomes `data.validation[0].path`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class of an annotation or of its items, or None."""
    candidates = [annotation, *get_args(annotation)]
    return next((item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)), None)


def all_settings() -> dict[str, FieldInfo]:
    """Return every setting by its dotted path; `model`, `objective` and `data` have those of every entry."""
    return dict(_settings_below(RunConfig, ()))


def _settings_below(section: type[BaseModel], path: tuple[str, ...]) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None or get_origin(field.annotation) is list:
            yield ".".join((*path, name)), field
        if inner is None:
            continue
        mark = f"{name}[]" if get_origin(field.annotation) is list else name
        for one in CHOICES[name].classes().values() if section is RunConfig and name in CHOICES else (inner,):
            yield from _settings_below(one, (*path, mark))


def find_field(path: SettingPath, data: Mapping[str, Any]) -> FieldInfo | None:
    """Return the schema's field at a path of a raw recipe; None if there is none."""
    return _walk(path, data)[0]


def _walk(path: SettingPath, data: Mapping[str, Any]) -> tuple[FieldInfo | None, type[BaseModel] | None]:
    """Return field and section class at a path, None for what is not there. Items of a list are as the list."""
    field: FieldInfo | None = None
    section: type[BaseModel] | None = RunConfig
    for name in (part for part in path if isinstance(part, str)):
        field = section.model_fields.get(name) if section else None
        if section is RunConfig and name in CHOICES:
            section = CHOICES[name].find(data.get(name))
        else:
            section = section_of(field.annotation) if field else None
    return field, section


def is_section(path: SettingPath, data: Mapping[str, Any]) -> bool:
    """Return True if a path is that of a section, not of a list of sections."""
    field = find_field(path, data)
    return field is not None and section_of(field.annotation) is not None and get_origin(field.annotation) is None


def explain_unknown(path: SettingPath, data: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the message about an unknown setting (may be empty), and the setting that it most likely means."""
    if path == ("pipeline",):
        return "; set it in slurm/route.sh instead (docs/route.md)", None
    if len(path) == 2 and (note := _note_of_owners(path, data)):
        return f": it is {note}", None
    meant = _meant_setting(path, data)
    if meant is None:
        return "", None
    parts = tuple(meant.split("."))
    note = "" if find_field(parts, data) is not None or "[" in meant else _note_of_owners(parts, data)
    return f"; did you mean {meant}?" + (f" It is {note}" if note else ""), meant


def _note_of_owners(path: SettingPath, data: Mapping[str, Any]) -> str:
    """Return which other families, objectives or formats have a setting, in words; empty if none."""
    choice = CHOICES.get(str(path[0]))
    owners = choice.owners(str(path[-1])) if choice is not None and len(path) == 2 else []
    if choice is None or not owners:
        return ""
    name = shortened(str(choice.name(data.get(choice.section))))
    return f"a setting of {listed(owners, 'and')}; {choice.path} is {name}"


def _meant_setting(path: SettingPath, data: Mapping[str, Any]) -> str | None:
    section = _walk(path[:-1], data)[1]
    key = str(path[-1])
    if section is None:
        return None
    here = list(section.model_fields)
    known = (setting for setting, names in KNOWN_ELSEWHERE.items() if key in names.split())
    if len(path) <= 2 and (found := next(known, None)) is not None:
        return found
    for cutoff in (0.75, 0.6):
        near = nearest_name(key, here, cutoff)
        if near is not None:
            return dotted((*path[:-1], near))
        if cutoff == 0.75 and (elsewhere := _setting_elsewhere(key, str(path[0]))) is not None:
            return elsewhere
    return None


def _setting_elsewhere(key: str, section: str) -> str | None:
    """Return the setting of any section that a name means; `section` goes first."""
    by_leaf: dict[str, str] = {}
    for path in sorted(all_settings(), key=lambda path: not path.startswith(f"{section}.")):
        by_leaf.setdefault(path.rsplit(".", 1)[-1], path)
    near = nearest_name(key, by_leaf, 0.85)
    return None if near is None else by_leaf[near].replace("[]", "")


def describe_type(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Return what a setting expects, in words: `a whole number from 1 to 10,000 or null`."""
    known = [item.func for item in metadata if isinstance(getattr(item, "func", None), KnownName)]
    if known:
        return known[0].describe()
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        items = [item.metadata if isinstance(item, FieldInfo) else [item] for item in extra]
        return describe_type(inner, tuple(chain.from_iterable(items)))
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(item) for item in get_args(annotation))
    if origin is Literal:
        return "one of " + ", ".join(str(item) for item in get_args(annotation))
    if origin is list:
        item = describe_type(get_args(annotation)[0])
        return "a list of " + item.replace("a section with", "sections with").removeprefix("a ")
    if origin is dict:
        return "sections of settings"
    if origin is tuple:
        kinds = get_args(annotation)
        return f"a list of {len(kinds)}: " + ", ".join(describe_type(kind) for kind in kinds)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        short = "text or " if hasattr(annotation, "SHORT_FORM") else ""
        return f"{short}a section with {', '.join(annotation.model_fields)}"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return words.get(annotation, str(annotation)) + _describe_bounds(metadata)


def describe_field(field: FieldInfo) -> str:
    """Return what a field of the schema expects, in words."""
    return describe_type(field.annotation, tuple(field.metadata))


def _describe_bounds(metadata: tuple[Any, ...]) -> str:
    names = ("gt", "ge", "lt", "le")
    bounds = {name: getattr(item, name) for item in metadata for name in names if hasattr(item, name)}
    shown = {name: f"{bound:,}" if isinstance(bound, int) else f"{bound:g}" for name, bound in bounds.items()}
    if "ge" in shown and "le" in shown:
        return f" from {shown['ge']} to {shown['le']}"
    words = {"gt": "above", "ge": "of at least", "lt": "below", "le": "at most"}
    return ",".join(f" {words[name]} {bound}" for name, bound in shown.items())
