"""The reference of every setting, written from the schema: what docs/config.md holds.

In: the schema and its field docstrings. Out: Markdown. Not here: files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ctxlm_ds.recipe.choices import CHOICES, Choice
from ctxlm_ds.recipe.describe import describe_field, section_of
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.yaml_source import write_yaml

INTRODUCTION = """# Settings of a recipe

Written from the schema (`ctxlm_ds/recipe/schema.py` and the registered families, objectives and sample formats) by
`tools/write_config_docs.py`; `make check` compares the two.

A recipe is a YAML file. `extends` names another one, shipped or your own, whose settings it starts from; sections
merge, everything else is replaced. `--set section.name=value` on the command line comes last. Unknown names, wrong
types and impossible combinations are reported all together, each with its place. Numbers may be written `6e-4` or
`1_000_000`; `true` and `false` are the only truth values.

`model.family`, `objective.name` and `data.sample_format` decide which further settings their sections have. A recipe
that names another one than the recipe it extends keeps the inherited settings that both have; the others go.
"""


def render_reference() -> str:
    """The whole page."""
    top = {name: field for name, field in RunConfig.model_fields.items() if section_of(field.annotation) is None}
    parts = [INTRODUCTION, "## Top level\n", _table(top, "")]
    for name, field in RunConfig.model_fields.items():
        section = section_of(field.annotation)
        if name in CHOICES:
            parts += _parts_of_choice(CHOICES[name])
        elif section is not None:
            parts += [f"## `{name}`\n", f"{_sentence(section.__doc__)}\n", _table(section.model_fields, f"{name}.")]
            parts += [_table_below(below, places) for below, places in _sections_below(section, f"{name}.").items()]
    return "\n".join(parts).rstrip() + "\n"


def _parts_of_choice(choice: Choice) -> list[str]:
    """Return a section that depends on a name: what it always has, then what each entry adds."""
    prefix, base = f"{choice.section}.", choice.base
    parts = [f"## `{choice.section}`\n", f"{_sentence(base.__doc__)}\n", _table(base.model_fields, prefix, choice)]
    for name, section in choice.classes().items():
        own = {key: field for key, field in section.model_fields.items() if key not in base.model_fields}
        parts += [f"### `{choice.path}: {name}`\n", f"{_sentence(section.__doc__)}\n"]
        parts += [_table(own, prefix)] if own else ["No settings of its own.\n"]
        parts += [_table_below(below, places) for below, places in _sections_below(section, prefix).items()
                  if below not in _sections_below(base, prefix)]  # fmt: skip
    return parts + [_table_below(below, places) for below, places in _sections_below(base, prefix).items()]


def _sections_below(section: type[BaseModel], prefix: str) -> dict[type[BaseModel], list[str]]:
    """Every kind of section below, with the places where it may stand: `a.b`, or `a.b[]` for items of a list."""
    found: dict[type[BaseModel], list[str]] = {}
    for name, field in section.model_fields.items():
        below = section_of(field.annotation)
        if below is None:
            continue
        place = f"{prefix}{name}[]" if get_origin(field.annotation) is list else f"{prefix}{name}"
        found.setdefault(below, []).append(place)
        for deeper, places in _sections_below(below, f"{place}.").items():
            found.setdefault(deeper, []).extend(places)
    return found


def _table_below(section: type[BaseModel], places: list[str]) -> str:
    """A kind of section, described once, wherever it stands."""
    names = [f"each item of `{place[:-2]}`" if place.endswith("[]") else f"`{place}`" for place in places]
    title = ", ".join(names)
    plain = len(places) == 1 and "[]" not in places[0]
    table = _table(section.model_fields, f"{places[0]}." if plain else "")
    return f"{title[0].upper()}{title[1:]}: {_sentence(section.__doc__)}\n\n{table}"


def _table(fields: Mapping[str, FieldInfo], prefix: str, choice: Choice | None = None) -> str:
    lines = ["| Setting | Default | Expects | Meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        default, expects = _default(field), describe_field(field)
        if choice is not None and name == choice.key:
            default, expects = f"`{choice.default}`", f"one of {', '.join(choice.registry.names())}"
        lines.append(f"| `{prefix}{name}` | {default} | {expects} | {_cell(field.description)} |")
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, BaseModel):
        return "its own defaults"
    return f"`{_inline(field.default)}`"


def _inline(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    return write_yaml(value).removesuffix("...\n").strip()


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


def _cell(text: str | None) -> str:
    return _sentence(text).replace("|", "\\|")
