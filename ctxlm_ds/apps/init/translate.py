"""Translate another program's arguments into settings of a recipe, by a table (megatron.yaml, run_mlm.yaml)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ctxlm_ds.apps.init.arguments import AT_RUN_TIME, Command, canonical
from ctxlm_ds.apps.init.shell import expansions_left
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.choices import CHOICES
from ctxlm_ds.recipe.problems import nearest_name
from ctxlm_ds.recipe.yaml_source import read_yaml

ORIGINALS = ("megatron", "run_mlm")
"""Tables by name."""
_FALSE = {"false", "f", "no", "n", "0"}


class Setting(NamedTuple):
    """A value of the recipe and where it comes from."""

    value: Any
    source: str
    is_default: bool = False
    """True if the original's default decides, not an argument."""


@dataclass(slots=True)
class Translation:
    """Settings of the recipe by dotted path, and notes for the user."""

    table: dict[str, Any]
    command: Command
    ranks: int
    data: str | None = None
    """Dataset prefix that the user names."""
    tokenizer: str | None = None
    """Tokenizer folder that the user names."""
    settings: dict[str, Setting] = field(default_factory=dict)
    without: dict[str, list[str]] = field(default_factory=dict)
    """Arguments that have no setting, by reason."""
    unknown: dict[str, str | None] = field(default_factory=dict)
    """Arguments that the original does not have either, and the nearest that it has."""
    notes: list[str] = field(default_factory=list)

    not_known: set[str] = field(default_factory=set)
    """Arguments whose value is known only when the script runs."""

    def typed(self, name: str) -> str:
        """Return an argument's name as the user wrote it."""
        return self.command.typed.get(canonical(name), name)

    def has(self, name: str) -> bool:
        """Return whether an argument is given."""
        return canonical(name) in self.command.given

    def texts(self, name: str) -> list[str]:
        """Return the values of an argument; empty if it is not given or a flag."""
        return self.command.given.get(canonical(name), [])

    def text(self, name: str) -> str | None:
        """Return the value of an argument; None if it is not given."""
        if not self.has(name):
            return None
        values = self.texts(name)
        if not values:
            raise ConfigError(f"{name}: its value is missing")
        return values[0]

    def number(self, name: str, default: float | None = None) -> Any:
        """Return the value of an argument as a number.

        Raises ConfigError if it is not a number.
        """
        text = self.text(name)
        if text is None:
            return default
        value = plain_value(text)
        if isinstance(value, str):
            raise ConfigError(f"{name} {text}: expected a number")
        return value

    def set(self, key: str, value: Any, source: str, is_default: bool = False) -> None:
        """Set a value of the recipe."""
        self.settings[key] = Setting(value, source, is_default)

    def value(self, key: str) -> Any:
        """Return a value that is set; None if it is not."""
        setting = self.settings.get(key)
        return None if setting is None else setting.value


@cache
def load_table(original: str) -> dict[str, Any]:
    """Return the table of an original."""
    path = Path(__file__).resolve().parent / f"{original}.yaml"
    table: dict[str, Any] = read_yaml(path.read_text(encoding="utf-8"), str(path)).data
    return table


def plain_value(text: str) -> int | float | str:
    """Return a number for the text of one, else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def translate(
    original: str, command: Command, ranks: int | None = None, data: str | None = None, tokenizer: str | None = None
) -> Translation:
    """Return the recipe's settings for a command.

    Args:
        original: name of the table.
        command: arguments as read.
        ranks: number of ranks; None takes the launcher's, or 1.
        data: prefix of the dataset to train on, in place of the command's.
        tokenizer: folder of the tokenizer, in place of the command's.

    Raises:
        ConfigError: the command names no script that the table has, or describes a model that no family has.
    """
    table = load_table(original)
    scripts = table["scripts"]
    if command.script not in scripts:
        raise ConfigError(f"the command names none of {', '.join(scripts)}; write that name before the arguments")
    result = Translation(table, command, ranks or command.ranks or 1, data, tokenizer, notes=[*command.remarks])
    script = scripts[command.script]
    _rename(command, script.get("renamed", {}))
    _drop_flags_that_are_off(result)
    _drop_unknown_values(result)
    settings = dict(script["settings"])
    for name, changes in script.get("variants", {}).items():
        settings |= changes if result.has(name) else {}
    for key, value in settings.items():
        result.set(key, value, command.script)
    rules = _apply_rows(result, script.get("defaults", {}))
    from ctxlm_ds.apps.init.rules import RULES  # imports this module

    for name, rule in RULES.items():
        if name in rules:
            _apply(rule, result, rules[name])
    _count_shares(result)
    _sort_others(result)
    _drop_foreign(result)
    return result


def _rename(command: Command, names: dict[str, str]) -> None:
    """Give a script's own arguments the names that the table has."""
    for own, name in names.items():
        if canonical(own) in command.given:
            command.given[canonical(name)] = command.given.pop(canonical(own))
            command.typed[canonical(name)] = command.typed[canonical(own)]


def _apply(rule: Callable[[Translation, list[str]], None], result: Translation, names: list[str]) -> None:
    """Apply a rule. Raises ConfigError if it cannot compute with the values."""
    try:
        rule(result, names)
    except (TypeError, ValueError, ArithmeticError) as error:
        given = " ".join(" ".join([result.typed(name), *result.texts(name)]) for name in names if result.has(name))
        raise ConfigError(f"{given or ', '.join(names)}: cannot be computed from these values ({error})") from error


def _drop_flags_that_are_off(result: Translation) -> None:
    """Take out `--bf16 False`, as the parser of transformers reads flags."""
    for name, row in result.table["arguments"].items():
        is_flag = row.get("flag", "given" in row)
        if is_flag and " ".join(result.texts(name)).lower() in _FALSE:
            del result.command.given[canonical(name)]


def _count_shares(result: Translation) -> None:
    """Turn intervals below 1 into steps, and leave out those that are no number (`epoch`)."""
    steps = result.value("training.max_steps")
    for name, row in result.table["arguments"].items():
        setting = result.settings.get(row.get("key", "")) if row.get("share") and result.has(name) else None
        if setting is None:
            continue
        if isinstance(setting.value, float) and 0 < setting.value < 1 and isinstance(steps, int):
            result.set(row["key"], max(1, math.ceil(setting.value * steps)), f"{setting.source} of {steps:,} steps")
        elif isinstance(setting.value, str):
            result.notes.append(f"{setting.source}: no counterpart; set {row['key']}")
            del result.settings[row["key"]]


def _drop_unknown_values(result: Translation) -> None:
    """Take out the values that are known only when the script runs, each with a note."""
    rows = {canonical(name): row for name, row in result.table["arguments"].items()}
    saved = result.command.given.get("--save")
    for name, values in [*result.command.given.items()]:
        if not any(map(expansions_left, values)):
            continue
        row, typed = rows.get(name, {}), result.typed(name)
        num_values = 0 if row.get("flag", "given" in row) else len(values) if row.get("many") else 1
        own, loose = values[:num_values], [word for word in values[num_values:] if expansions_left(word)]
        result.command.given[name] = [word for word in values if word not in loose]
        result.notes += [f"{word} after {typed}: {AT_RUN_TIME}; write the arguments that it holds" for word in loose]
        left = [expansion for word in own for expansion in expansions_left(word)]
        if not left or "given" in row:
            continue
        named = {"data.train": result.data, "tokenizer.path": result.tokenizer}.get(row.get("key", ""))
        if named is None and (row.get("rule") != "load" or values != saved):
            key = f"; set {row['key']}" if row else ""
            result.notes.append(f"{' '.join([typed, *own])}: {', '.join(dict.fromkeys(left))} is {AT_RUN_TIME}{key}")
        if row:
            del result.command.given[name]
            result.not_known.add(name)


def _apply_rows(result: Translation, defaults: dict[str, Any]) -> dict[str, list[str]]:
    """Set what needs no rule; return the rules to apply, with the arguments of each.

    `defaults` go before those of the rows; None sets nothing.
    """
    rules: dict[str, list[str]] = {}
    for name, row in result.table["arguments"].items():
        if "rule" in row:
            rules.setdefault(row["rule"], []).append(name)
        elif "expect" in row:
            _check_expected(result, name, row)
        elif result.has(name):
            value = row["given"] if "given" in row else _mapped(result, name, row)
            if value is not None:
                result.set(row["key"], value, " ".join([result.typed(name), *result.texts(name)]))
        elif row["key"] not in result.settings and canonical(name) not in result.not_known:
            value = defaults.get(name, row.get("default"))
            if value is None:
                continue
            value = row.get("values", {}).get(value, value)
            result.set(row["key"], value, f"default of {name}", is_default=True)
    return rules


def _mapped(result: Translation, name: str, row: dict[str, Any]) -> Any:
    """Return the setting's value for an argument's; None (and a note) if it has no counterpart."""
    text = result.text(name) or ""
    if "values" not in row:
        return plain_value(text)
    values = {str(key): value for key, value in row["values"].items()}
    if text not in values:
        result.notes.append(f"{name} {text}: no counterpart; {row['key']} has {', '.join(map(str, values.values()))}")
    return values.get(text)


def _check_expected(result: Translation, name: str, row: dict[str, Any]) -> None:
    """Raise ConfigError if the chosen family does not compute what an argument asks for."""
    family = result.value("model.family")
    if not result.has(name) and "default" not in row:
        return
    value = " ".join(result.texts(name)) if result.has(name) else row["default"]
    expected = row["expect"].get(family)
    if expected is None or (expected and value not in expected):
        raise ConfigError(
            f"{name} {value}".rstrip() + f": family {family}, which the other arguments describe, has "
            f"{' or '.join(expected) if expected else 'no such part'}; docs/migrate.md lists the models that exist"
        )


def _sort_others(result: Translation) -> None:
    """Sort the arguments that no row maps into those without a setting and unknown ones."""
    mapped = {canonical(name) for name in result.table["arguments"]}
    patterns = {canonical(pattern): group["why"] for group in result.table["without"] for pattern in group["arguments"]}
    for name in result.command.given:
        if name in mapped:
            continue
        why = next((why for pattern, why in patterns.items() if fnmatchcase(name, pattern)), None)
        if why is None:
            known = [*mapped, *(one for one in patterns if "*" not in one)]
            result.unknown[result.typed(name)] = nearest_name(name, known)
        else:
            result.without.setdefault(why, []).append(result.typed(name))


def _drop_foreign(result: Translation) -> None:
    """Drop settings that the chosen family, objective and sample format do not have."""
    for choice in CHOICES.values():
        name = result.value(choice.path)
        section = choice.find({choice.key: name} if name else {})
        if section is None:
            continue
        prefix = f"{choice.section}."
        for key in [key for key in result.settings if key.startswith(prefix)]:
            if key.removeprefix(prefix) not in section.model_fields:
                setting = result.settings.pop(key)
                if not setting.is_default:
                    result.notes.append(f"{setting.source}: {name or choice.default} has no {key}")
