"""Translate another program's arguments into settings of a recipe, by a table (megatron.yaml, run_mlm.yaml)."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any

from ctxlm_ds.apps.init.rules import RULES
from ctxlm_ds.apps.init.settings import Translation, canonical, load_table, plain_value
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.choices import CHOICES
from ctxlm_ds.recipe.deepspeed_rules import AUTO
from ctxlm_ds.recipe.json_source import load_deepspeed_json
from ctxlm_ds.recipe.problems import nearest_name
from ctxlm_ds.recipe.schema import flat_settings

_FALSE = {"false", "f", "no", "n", "0"}


def translate(
    original: str, result: Translation, ranks: int | None = None, data: str | None = None, tokenizer: str | None = None
) -> Translation:
    """Add the recipe's settings to a command that was read, by the table called `original`.

    `ranks`, `data` (a prefix) and `tokenizer` (a folder) replace those of the command. Raises ConfigError if the
    command describes a model that no family has, or a value cannot be computed with.
    """
    result.table, result.data, result.tokenizer = load_table(original), data, tokenizer
    result.ranks = ranks or result.ranks or 1
    script = result.table["scripts"][result.script]
    for own, name in script.get("renamed", {}).items():
        if result.has(own):
            result.arguments[canonical(name)] = result.arguments.pop(canonical(own))
            result.typed[canonical(name)] = result.typed.pop(canonical(own))
    for name, row in result.table["arguments"].items():
        # `--bf16 False` is off, as the parser of transformers reads flags.
        if row.get("flag", "given" in row) and " ".join(result.texts(name)).lower() in _FALSE:
            del result.arguments[canonical(name)]
    settings = dict(script["settings"])
    for name, changes in script.get("variants", {}).items():
        settings |= changes if result.has(name) else {}
    for key, value in settings.items():
        result.set(key, value, result.script)
    _read_engine_json(result)
    rules = _apply_rows(result, script.get("defaults", {}))
    for name in (name for name in RULES if name in rules):
        try:
            RULES[name](result, rules[name])
        except (TypeError, ValueError, ArithmeticError) as error:
            given = result.given(*rules[name]) or ", ".join(rules[name])
            raise ConfigError(f"{given}: cannot be computed from these values ({error})") from error
    _count_shares(result)
    _sort_others(result)
    _drop_foreign(result)
    return result


def _read_engine_json(result: Translation) -> None:
    """Take the values of DeepSpeed's JSON for arguments that are not given; note a ZeRO stage that it does not have."""
    name = "--deepspeed-config"
    if (file := result.text(name)) is None:
        return
    try:
        values = load_deepspeed_json(file)
    except ConfigError:  # The command notes why a run will refuse it.
        values = {}
    # DeepSpeed's scale begins at 2^16; Megatron's default does not count.
    found = {"fp16.initial_scale_power": 16} | flat_settings(values)
    for path, argument in result.table["arguments"].get(name, {}).get("json", {}).items():
        value = found.get(path)
        if value not in (None, AUTO) and value is not False and not result.has(argument):
            result.arguments[canonical(argument)] = [] if value is True else [str(value)]
            result.typed[canonical(argument)] = f"{file}: {path}"
    stage = found.get("zero_optimization.stage", 0)
    if result.text("--zero-stage") not in (None, str(stage)):
        result.notes.append(f"{result.given('--zero-stage')}: not taken; {file} decides, and has stage {stage}")


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


def _apply_rows(result: Translation, defaults: dict[str, Any]) -> dict[str, list[str]]:
    """Set what needs no rule; return the rules to apply, with their arguments. `defaults` go before those of rows."""
    rules: dict[str, list[str]] = {}
    for name, row in result.table["arguments"].items():
        if "rule" in row:
            rules.setdefault(row["rule"], []).append(name)
        elif "expect" in row:
            _check_expected(result, name, row)
        elif result.has(name):
            value = row["given"] if "given" in row else _mapped(result, name, row)
            if value is not None:
                result.set(row["key"], value, result.given(name))
        elif row["key"] not in result.settings:
            value = defaults.get(name, row.get("default"))
            if value is None:
                continue
            value = row.get("values", {}).get(value, value)
            result.set(row["key"], value, f"default of {name}", is_default=True)
    return rules


def _mapped(result: Translation, name: str, row: dict[str, Any]) -> Any:
    """Return the setting's value for an argument's; None (and a note) if it has no counterpart."""
    if row.get("many"):
        return [plain_value(word) for word in result.texts(name)]
    text = result.text(name) or ""
    if "values" not in row:
        return result.number(name) / row["divided_by"] if "divided_by" in row else plain_value(text)
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
    for name in result.arguments:
        if name in mapped:
            continue
        why = next((why for pattern, why in patterns.items() if fnmatchcase(name, pattern)), None)
        if why is None:
            known = [*mapped, *(one for one in patterns if "*" not in one)]
            result.unknown[result.typed[name]] = nearest_name(name, known)
        else:
            result.without.setdefault(why, []).append(result.typed[name])


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
