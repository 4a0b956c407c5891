"""Settings of a recipe as plain data that remembers where each was written, merged and checked.

All problems are raised in one ConfigError. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ctxlm_ds.console import logger
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.check import find_problems, naming_problems
from ctxlm_ds.recipe.choices import CHOICES, Choice, listed
from ctxlm_ds.recipe.describe import describe_field, describe_type, dotted, explain_unknown, find_field, is_section
from ctxlm_ds.recipe.problems import Problem, did_you_mean, raise_problems, show_value, text_problem
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.words import let_steps_follow
from ctxlm_ds.recipe.yaml_source import SettingPath, YamlSource, integral_floats_as_ints, read_yaml


@dataclass(frozen=True, slots=True)
class RenamedSetting:
    """A setting that has a new name. Its old name is accepted with a warning for one minor version."""

    section: str
    old: str
    new: str
    removed_in: str
    """Version in which the old name becomes an unknown setting."""


RENAMED: list[RenamedSetting] = []


@dataclass(slots=True)
class RawRecipe:
    """Settings merged so far, where each was written, and problems of reading them."""

    data: dict[str, Any] = field(default_factory=dict)
    places: list[dict[SettingPath, str]] = field(default_factory=list)
    """Per source, the newest last: file and line (or option) of every setting that it writes."""
    problems: list[Problem] = field(default_factory=list)
    options: set[str] = field(default_factory=set)
    """The places that are options of the command line, or lines of a file with such."""

    def merge(self, source: YamlSource, name: str, below: tuple[str, ...] = ()) -> None:
        """Merge a file or an option called `name`: sections merge, other values are replaced.

        `below` is the setting that the option gives, empty for a file.
        """
        if below:
            self.options.add(name)
            lines: dict[SettingPath, str] = {below[: depth + 1]: name for depth in range(len(below))}
            self.places.append(lines | {(*below, *path): name for path in source.lines})
        else:
            self.places.append({path: f"{name}:{line}" for path, line in source.lines.items()})
        for path, line, reason in source.problems:
            place = name if below else f"{name}:{line}"
            self.problems.append(Problem(dotted((*below, *path)) or name, reason, where=place))
        value = {} if source.data is None and not below else source.data
        for part in reversed(below):
            value = {part: value}
        if not isinstance(value, dict):
            raise ConfigError(f"{name}: a recipe is a section of settings, not {show_value(value)}")
        self._take_new_names(value)
        self._switch(value)
        self._merge_section(self.data, value, ())

    def _take_new_names(self, new: dict[str, Any]) -> None:
        """Replace old names of settings (RENAMED) in the newest source, with a warning for each."""
        for one in RENAMED:
            section, old, name = new.get(one.section), (one.section, one.old), f"{one.section}.{one.new}"
            if not isinstance(section, dict) or one.old not in section:
                continue
            place = self.places[-1].get(old, "")
            if one.new in section:
                self.problems.append(Problem(dotted(old), f"is the old name of {name}; give one of them", where=place))
            section.setdefault(one.new, section.pop(one.old))
            moved = {(*old[:1], one.new, *path[2:]): line for path, line in self.places[-1].items() if path[:2] == old}
            self.places[-1] = {**moved, **self.places[-1]}
            now = f"{dotted(old)} is now {name}; version {one.removed_in} refuses the old name"
            logger.warning("%s: %s", place, now)

    def _merge_section(self, target: dict[str, Any], new: dict[str, Any], path: SettingPath) -> None:
        for key, value in new.items():
            value = {} if value is None and is_section((*path, key), self.data) else value
            if isinstance(value, dict) and isinstance(target.get(key, {}), dict):
                self._merge_section(target.setdefault(key, {}), value, (*path, key))
            else:
                target[key] = value

    def origin(self, path: SettingPath) -> str:
        """Return file and line (or option) of a setting, or of the nearest section around it that was written."""
        names = tuple(takewhile(lambda part: isinstance(part, str), path))
        for name in (names[:depth] for depth in range(len(names), 0, -1)):
            for places in reversed(self.places):
                if name in places:
                    # A list is replaced completely, so its items are in the same source.
                    inside = (path[:depth] for depth in range(len(path), len(name), -1))
                    return places[next((one for one in inside if one in places), name)]
        return ""

    def drop_settings_of_others(self, choices: Iterable[Choice]) -> Iterator[str]:
        """Drop settings that only other entries have, and yield a note about each."""
        for choice in choices:
            settings = self.data.get(choice.section)
            section = choice.find(settings)
            if isinstance(settings, dict) and section is not None:
                for key in [key for key in settings if key not in section.model_fields and choice.owners(key)]:
                    place, owners = f"{choice.path} {choice.name(settings)}", listed(choice.owners(key), "and")
                    yield f"{choice.section}.{key} has no effect with {place}: it is a setting of {owners}"
                    del settings[key]

    def _switch(self, new: dict[str, Any]) -> None:
        """Drop inherited settings that a newly named family, objective or format does not have.

        Settings from the command line stay and are reported as unknown: the order of its options does not count.
        """
        for choice in CHOICES.values():
            old, settings = self.data.get(choice.section), new.get(choice.section)
            if not isinstance(old, dict) or not isinstance(settings, dict) or choice.key not in settings:
                continue
            before, after = choice.find(old), choice.find(settings)
            if before is None or after is None or before is after:
                continue
            for key in [key for key in old if key in before.model_fields and key not in after.model_fields]:
                if self.origin((choice.section, key)) not in self.options:
                    del old[key]
            old[choice.key] = settings[choice.key]


def validate(tree: RawRecipe, title: str, world_size: int | None = None, is_new: bool = False) -> RunConfig:
    """Return the config, or raise every problem; wrong settings are left out of the cross-field checks.

    `is_new` also checks what a saved recipe of an earlier version need not fulfil.
    """
    data = let_steps_follow(integral_floats_as_ints(tree.data))
    problems = [*tree.problems, *_unusable_texts(tree, data), *_unknown_names(tree, data)]
    suspicious = {path for problem in problems for path in (problem.path, *problem.involves)}
    config: RunConfig | None = None
    while config is None:
        try:
            config = RunConfig.model_validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            # Every kind of value that a setting may have reports the same wrong value.
            for details in {_setting_path(details): details for details in error.errors(include_url=False)}.values():
                problem = _explain(details, tree)
                problems.append(problem)
                suspicious.update((problem.path, *problem.involves))
                _remove(data, _setting_path(details))
    found = [*find_problems(config, world_size), *(naming_problems(config.data, config.run_dir) if is_new else ())]
    problems += [
        problem
        for problem in found
        if not any(_overlap(path, other) for path in (problem.path, *problem.involves) for other in suspicious)
    ]
    raise_problems(title, [problem if problem.where else _placed(problem, tree) for problem in problems])
    return config


def _unusable_texts(tree: RawRecipe, data: dict[str, Any]) -> list[Problem]:
    """Return texts that are neither names nor paths, and remove them from `data`."""
    found: list[tuple[SettingPath, str]] = []

    def visit(value: Any, path: SettingPath) -> None:
        texts = [path[-1]] if path and isinstance(path[-1], str) else []
        reasons = [reason for text in [*texts, value] if isinstance(text, str) and (reason := text_problem(text))]
        found.extend((path, reason) for reason in reasons[:1])
        if isinstance(value, (dict, list)) and not reasons:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                visit(item, (*path, key))

    visit(data, ())
    for path, _ in found:
        _remove(data, path)
    return [Problem(ascii(dotted(path))[1:-1], reason, where=tree.origin(path)) for path, reason in found]


def _unknown_names(tree: RawRecipe, data: dict[str, Any]) -> Iterator[Problem]:
    """Yield each name that chooses no family, objective or format, and remove its section from `data`."""
    for choice in CHOICES.values():
        settings = data.get(choice.section)
        if isinstance(settings, dict) and (reason := choice.why_not(settings)) is not None:
            del data[choice.section]
            yield Problem(choice.path, reason, (choice.section,), tree.origin((choice.section, choice.key)))


def _overlap(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def _placed(problem: Problem, tree: RawRecipe) -> Problem:
    """Return the problem with the place where its setting, or another that it involves, was written."""
    paths = [tuple(path.split(".")) for path in (problem.path, *problem.involves)]
    written = (path for path in paths if any(path in places for places in tree.places))
    return replace(problem, where=tree.origin(next(written, ())))


def _setting_path(details: ErrorDetails) -> SettingPath:
    """Return the path of the wrong setting, without the kind of value that pydantic tried, such as `list[int]`."""
    if details["type"] == "extra_forbidden":
        return details["loc"]
    return tuple(takewhile(lambda part: not (isinstance(part, str) and "[" in part), details["loc"]))


def _explain(details: ErrorDetails, tree: RawRecipe) -> Problem:
    path, kind = _setting_path(details), details["type"]
    name, where = dotted(path), tree.origin(path)
    field_info = find_field(path, tree.data)
    expected = "something else" if field_info is None else describe_field(field_info)
    if field_info is not None and isinstance(path[-1], int):
        items = get_args(field_info.annotation)
        expected = describe_type(items[min(path[-1], len(items) - 1)])
    if kind == "missing":
        return Problem(name, f"missing; expected {expected}", where=where)
    value = details["input"]
    if kind == "extra_forbidden":
        hint, meant = explain_unknown(path, tree.data)
        return Problem(name, f"unknown setting (value {show_value(value)}){hint}", (meant or "",), where)
    return Problem(name, f"{show_value(value)}: expected {expected}{_type_hint(kind, value, expected)}", where=where)


def _type_hint(kind: str, value: Any, expected: str) -> str:
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type"):
        plain = read_yaml(value, "value").data if ":" not in value and "{" not in value else value
        return f"; write {value} without quotes" if isinstance(plain, (int, float)) else ""
    if kind == "string_type" and isinstance(value, (bool, int, float)):
        return f'; write "{show_value(value)}" in quotes if you mean the text'
    if kind == "list_type" and isinstance(value, str):
        return f"; write [{value}]"
    if kind == "literal_error":
        return did_you_mean(str(value), expected.removeprefix("one of ").split(", "))
    return ""


def _remove(data: dict[str, Any], path: SettingPath) -> None:
    """Remove the value at a path; a list with a wrong item is removed completely."""
    *sections, name = takewhile(lambda part: isinstance(part, str), path)
    holder: Any = data
    for section in sections:
        holder = holder.get(section, {})
    if isinstance(holder, dict):
        holder.pop(name, None)
