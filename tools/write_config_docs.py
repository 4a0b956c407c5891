"""Write docs/config.md from the schema's docstrings; `--check` only compares."""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ctxlm_ds.atomic import write_text
from ctxlm_ds.console import run_command
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.choices import CHOICES, Choice
from ctxlm_ds.recipe.describe import describe_field, section_of
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.yaml_source import write_yaml

ROOT = Path(__file__).resolve().parent.parent
HEADER = ("| Setting | Default | Expects | Meaning |", "|---|---|---|---|")
INTRODUCTION = """# Settings of a recipe

Written from the schema (`ctxlm_ds/recipe/schema.py` and the registered entries) by
`tools/write_config_docs.py`; `make check` compares the two.

A recipe is a YAML file. `extends` names another recipe, shipped or your own, that it starts from: sections merge, other
values are replaced. `--set section.name=value` on the command line comes last. Numbers may be written `6e-4` or
`1_000_000`; the only booleans are `true` and `false`.

`model.family`, `objective.name`, `data.sample_format`, `optimizer.name` and `schedule.name` decide which further
settings their sections have. A recipe that changes one of them keeps the inherited settings that both have and drops
the others.
"""


def render_reference() -> str:
    """Return the complete page."""
    fields, lists = RunConfig.model_fields, [name for name, one in RunConfig.model_fields.items() if is_list(one)]
    top = [name for name, field in fields.items() if name in lists or section_of(field.annotation) is None]
    parts = [INTRODUCTION, "## Top level\n", _table(RunConfig, "", names=top)]
    for name, field in fields.items():
        section = section_of(field.annotation)
        if name in CHOICES:
            parts += _parts_of_choice(CHOICES[name])
        elif section is not None:
            prefix = f"{name}[]." if name in lists else f"{name}."
            parts += [f"## `{name}`\n", f"{_sentence(section.__doc__)}\n", _table(section, prefix)]
            parts += [_table_below(below, places) for below, places in _sections_below(section, f"{name}.").items()]
    return "\n".join(parts).rstrip() + "\n"


def is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is list


def _parts_of_choice(choice: Choice) -> list[str]:
    """Return a section that depends on a name: common settings, then settings that shipped entries add."""
    prefix, base, registered = f"{choice.section}.", choice.base, choice.classes()
    classes = {name: registered[name] for name in choice.registry.shipped_names()}
    parts = [f"## `{choice.section}`\n", f"{_sentence(base.__doc__)}\n", _table(base, prefix, choice)]
    parts.append("\n".join(f"- `{name}`: {_sentence(section.__doc__)}" for name, section in classes.items()) + "\n")
    owners: dict[str, list[str]] = {}
    for name, section in classes.items():
        for key in section.model_fields:
            if key not in base.model_fields:
                owners.setdefault(_row(section, key, prefix), []).append(name)
    for names in dict.fromkeys(map(tuple, owners.values())):
        rows = [row for row, having in owners.items() if tuple(having) == names]
        parts += [f"### `{choice.path}`: {', '.join(names)}\n", "\n".join([*HEADER, *rows]) + "\n"]
    below = {
        one: places for section in (*classes.values(), base) for one, places in _sections_below(section, prefix).items()
    }
    return parts + [_table_below(section, places) for section, places in below.items()]


def _sections_below(section: type[BaseModel], prefix: str) -> dict[type[BaseModel], list[str]]:
    """Return every section class below, with its paths: `a.b`, or `a.b[]` for items of a list."""
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
    """Return the table of a section class that is used at one or more places."""
    names = [f"each item of `{place[:-2]}`" if place.endswith("[]") else f"`{place}`" for place in places]
    title = ", ".join(names)
    plain = len(places) == 1 and "[]" not in places[0]
    table = _table(section, f"{places[0]}." if plain else "")
    return f"{title[0].upper()}{title[1:]}: {_sentence(section.__doc__)}\n\n{table}"


def _table(
    section: type[BaseModel], prefix: str, choice: Choice | None = None, names: Iterable[str] | None = None
) -> str:
    rows = [_row(section, name, prefix, choice) for name in names or section.model_fields]
    return "\n".join([*HEADER, *rows]) + "\n"


@cache
def _meanings(section: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field of a section and its bases.

    pydantic can read them too, but would do it when a class is made, which takes a third of a second of each command.
    """
    found = dict[str, str]()
    for one in (one for one in reversed(section.__mro__) if issubclass(one, BaseModel) and one is not BaseModel):
        body = ast.parse(dedent(inspect.getsource(one))).body[0].body  # type: ignore[attr-defined]
        for field, text in zip(body, body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = ast.literal_eval(text.value)
    return found


def _row(section: type[BaseModel], name: str, prefix: str, choice: Choice | None = None) -> str:
    path, field = f"{prefix}{name}", section.model_fields[name]
    default, expects = _default(field), describe_field(field)
    if choice is not None and path == choice.path:
        default, expects = f"`{choice.default}`", f"one of {', '.join(choice.registry.shipped_names())}"
    meaning = _sentence(_meanings(section).get(name)).replace("|", "\\|")
    return f"| `{path}` | {default} | {expects} | {meaning} |"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, BaseModel):
        return "the defaults of the section"
    return f"`{_inline(field.default)}`"


def _inline(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    return write_yaml(value).removesuffix("...\n").strip()


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


def write_or_compare(render: Callable[[], str], name: str, tool: str) -> None:
    """Write a page of docs/, or with `--check` compare it with the file; ConfigError if they differ."""
    path = ROOT / "docs" / name
    parser = argparse.ArgumentParser(description=f"Write docs/{name} from the code; `--check` only compares.")
    parser.add_argument("--output", type=Path, default=path, help=f"file to write (default: docs/{name})")
    parser.add_argument("--check", action="store_true", help="fail if the file is not up to date")
    arguments = parser.parse_args()
    page = render()
    if not arguments.check:
        write_text(arguments.output, page)
        print(f"wrote {arguments.output}")
        return
    written = arguments.output.read_text(encoding="utf-8") if arguments.output.exists() else ""
    if written != page:
        raise ConfigError(f"{arguments.output} differs from the code; run: python tools/{tool}")
    print(f"{arguments.output} is up to date")


def main() -> None:
    """Write docs/config.md, or compare it."""
    write_or_compare(render_reference, "config.md", "write_config_docs.py")


if __name__ == "__main__":
    run_command(main)
