"""Sections whose settings depend on a name: `model` by its family, `data` by its format, others by their `name`.

The registry's entry has the class of the section; it is imported when a recipe names it. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError, ValidationInfo, ValidatorFunctionWrapHandler
from pydantic_core import InitErrorDetails, PydanticCustomError

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.problems import did_you_mean, show_value
from ctxlm_ds.recipe.sections import (
    DataSection,
    ModelSection,
    ObjectiveSection,
    OptimizerSection,
    ScheduleSection,
    Section,
)
from ctxlm_ds.registry import FAMILIES, FORMATS, OBJECTIVES, OPTIMIZERS, SCHEDULES, Registry


@dataclass(frozen=True)
class KnownName:
    """A validator (for pydantic's AfterValidator) of a setting that names entries but has no further settings."""

    registry: Registry
    others: tuple[str, ...] = ()
    """Names that are accepted in addition."""
    prefix: str = ""
    """Beginning of the names in the registry that the setting leaves out."""

    def __call__(self, value: str) -> str:
        """Return the name, or raise pydantic's error if no entry has it."""
        if value not in self.others and f"{self.prefix}{value}" not in self.registry:
            raise PydanticCustomError("literal_error", "expected {names}", {"names": self.describe()})
        return value

    def describe(self) -> str:
        """Return what the setting expects, in words."""
        given = (name for name in self.registry.names() if name.startswith(self.prefix))
        return f"one of {', '.join([*self.others, *(name.removeprefix(self.prefix) for name in given)])}"


@dataclass(frozen=True)
class Choice:
    """One section whose settings depend on a name."""

    section: str
    key: str
    """Setting of the section that names the registry's entry."""
    base: type[Section]
    """Class with the settings that every entry has."""
    registry: Registry
    default: str
    """Name of the entry if a recipe gives none."""

    @property
    def path(self) -> str:
        """Dotted path of the setting that names the entry."""
        return f"{self.section}.{self.key}"

    def name(self, settings: Any) -> Any:
        """Return the name that a raw section gives, or the default."""
        return settings.get(self.key, self.default) if isinstance(settings, dict) else self.default

    def why_not(self, settings: Any) -> str | None:
        """Return the reason why the name in a raw section chooses no entry; None if it chooses one."""
        name = self.name(settings)
        if isinstance(name, str) and name in self.registry:
            try:
                self.registry.get(name)
            except ConfigError as error:
                return str(error)
            return None
        names = self.registry.names()
        return f"{show_value(name)}: expected one of {', '.join(names)}{did_you_mean(str(name), names)}"

    def find(self, settings: Any) -> type[Section] | None:
        """Return the class of a raw section; None if its name chooses no entry."""
        return None if self.why_not(settings) else self._class_of(self.name(settings))

    def make(self, name: str | None = None, **settings: Any) -> Any:
        """Return the section of an entry, or of the default one, with these settings and its defaults."""
        return self._class_of(name or self.default)(**settings)

    def entries(self) -> dict[str, Any]:
        """Return every entry that can be imported, by name."""
        return {name: self.registry.get(name) for name in self.registry.names() if not self.why_not({self.key: name})}

    def classes(self) -> dict[str, type[Section]]:
        """Return the section class of every entry that can be imported, by name."""
        return {name: entry.section for name, entry in self.entries().items()}

    def owners(self, setting: str) -> list[str]:
        return [name for name, section in self.classes().items() if setting in section.model_fields]

    def validate(self, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        """Validate a section against the class that it names (a pydantic WrapValidator); JSON is validated strictly."""
        if not isinstance(value, dict):
            return handler(value)
        reason = self.why_not(value)
        if reason is not None:
            error = PydanticCustomError("unknown_name", "{reason}", {"reason": reason})
            details = InitErrorDetails(type=error, loc=(self.key,), input=self.name(value))
            raise ValidationError.from_exception_data(self.section, [details])
        section = self._class_of(self.name(value))
        if info.mode == "json":
            return section.model_validate_json(json.dumps(value), strict=True)
        return section.model_validate(value)

    def _class_of(self, name: str) -> type[Section]:
        return self.registry.get(name).section


MODEL = Choice("model", "family", ModelSection, FAMILIES, "bert")
OBJECTIVE = Choice("objective", "name", ObjectiveSection, OBJECTIVES, "masked_lm_nsp")
DATA = Choice("data", "sample_format", DataSection, FORMATS, "segment_pair")
OPTIMIZER = Choice("optimizer", "name", OptimizerSection, OPTIMIZERS, "adamw")
SCHEDULE = Choice("schedule", "name", ScheduleSection, SCHEDULES, "linear")
CHOICES = {choice.section: choice for choice in (MODEL, OBJECTIVE, DATA, OPTIMIZER, SCHEDULE)}


def listed(names: Iterable[str], word: str = "or") -> str:
    """Join names for a sentence: `a`, `a or b`, `a, b or c`."""
    *most, last = names
    return f"{', '.join(most)} {word} {last}" if most else last
