"""Settings as they were written: files and overrides laid over each other, each setting with its place.

In: read YAML. Out: one tree of plain data. Not here: types (schema.py), what is impossible together (check.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.choices import CHOICES
from ctxlm_ds.recipe.describe import Path as SettingPath
from ctxlm_ds.recipe.describe import dotted, find_field
from ctxlm_ds.recipe.problems import Problem, show_value
from ctxlm_ds.recipe.section import Section
from ctxlm_ds.recipe.yaml_source import YamlSource

COMMAND_LINE = "--set "
"""What the origin of a setting from the command line begins with."""


@dataclass(slots=True)
class RawRecipe:
    """Settings merged so far, where each came from, and what could not be read."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[SettingPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def merge(self, source: YamlSource, name: str, below: tuple[str, ...] = ()) -> None:
        """Lay a source over what is there: sections merge, everything else is replaced."""

        def where(path: SettingPath) -> str:
            return f"{name}:{source.lines[path]}" if path in source.lines and not below else name

        for path, line, reason in source.problems:
            place = name if below else f"{name}:{line}"
            self.problems.append(Problem(dotted((*below, *path)) or name, reason, where=place))
        value = source.data
        if not below:
            value = {} if value is None else value
            if not isinstance(value, dict):
                raise ConfigError(f"{name}: a recipe is a section of settings, not {show_value(value)}")
        for part in reversed(below):
            value = {part: value}
        self._switch(value)
        self._merge_section(self.data, value, (), lambda path: where(path[len(below) :]))

    def _merge_section(self, target: dict[str, Any], new: dict[str, Any], path: SettingPath, where: Any) -> None:
        for key, value in new.items():
            here = (*path, key)
            if value is None and self._is_section(here):
                value = {}
            self.origins[here] = where(here)
            if isinstance(value, dict) and isinstance(target.get(key, {}), dict):
                self._merge_section(target.setdefault(key, {}), value, here, where)
            else:
                target[key] = value
                self._forget_below(here)
                self._remember_below(value, here, where)

    def _forget_below(self, path: SettingPath) -> None:
        for other in [other for other in self.origins if len(other) > len(path) and other[: len(path)] == path]:
            del self.origins[other]

    def _remember_below(self, value: Any, path: SettingPath, where: Any) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            self.origins[(*path, key)] = where((*path, key))
            self._remember_below(item, (*path, key), where)

    def origin(self, path: SettingPath) -> str:
        """File and line (or option) of a setting, or of the nearest section above it that was written."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path, "")

    def value(self, path: SettingPath) -> Any:
        """The value at a path, as it was written."""
        value: Any = self.data
        for part in path:
            value = value[part]
        return value

    def drop_settings_of_others(self) -> None:
        """Drop settings that only other families, objectives and formats have: earlier versions saved all of them."""
        for choice in CHOICES.values():
            settings = self.data.get(choice.section)
            section = choice.find(settings)
            if isinstance(settings, dict) and section is not None:
                unknown = [key for key in settings if key not in section.model_fields]
                self._drop(choice.section, [key for key in unknown if choice.owners(key)])

    def _switch(self, new: dict[str, Any]) -> None:
        """Drop inherited settings that a newly named family, objective or format does not have.

        Those of the command line stay, to be told as unknown: the order of its options does not count.
        """
        for choice in CHOICES.values():
            old, settings = self.data.get(choice.section), new.get(choice.section)
            if not isinstance(old, dict) or not isinstance(settings, dict) or choice.key not in settings:
                continue
            before, after = choice.find(old), choice.find(settings)
            if before is None or after is None or before is after:
                continue
            gone = [key for key in old if key in before.model_fields and key not in after.model_fields]
            self._drop(choice.section, [key for key in gone if not self._is_of_command_line((choice.section, key))])
            old[choice.key] = settings[choice.key]

    def _drop(self, section: str, keys: list[str]) -> None:
        for key in keys:
            del self.data[section][key]
            self._forget_below((section, key))
            self.origins.pop((section, key), None)

    def _is_of_command_line(self, path: SettingPath) -> bool:
        return self.origin(path).startswith(COMMAND_LINE)

    def _is_section(self, path: SettingPath) -> bool:
        field_info = find_field(path, self.data)
        annotation = None if field_info is None else field_info.annotation
        return isinstance(annotation, type) and issubclass(annotation, Section)
