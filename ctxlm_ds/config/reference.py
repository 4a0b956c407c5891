"""The reference of every setting, written from the schema: what docs/config.md holds.

In: the schema and its field docstrings. Out: Markdown. Not here: files.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ctxlm_ds.config.describe import describe_field, section_of
from ctxlm_ds.config.schema import RunConfig
from ctxlm_ds.config.yaml_source import write_yaml

INTRODUCTION = """# Settings of a recipe

Written from `ctxlm_ds/config/schema.py` by `tools/write_config_docs.py`; `make check` compares the two.

A recipe is a YAML file. `extends` names another one, shipped or your own, whose settings it starts from; sections
merge, everything else is replaced. `--set section.name=value` on the command line comes last. Unknown names, wrong
types and impossible combinations are reported all together, each with its place. Numbers may be written `6e-4` or
`1_000_000`; `true` and `false` are the only truth values.
"""


def render_reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION, "## Top level\n", _table(RunConfig, "", sections=False)]
    for name, field in RunConfig.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            parts += [f"## `{name}`\n", f"{_sentence(section.__doc__)}\n", _table(section, f"{name}.", sections=True)]
    return "\n".join(parts).rstrip() + "\n"


def _table(section: type[BaseModel], prefix: str, sections: bool) -> str:
    lines = ["| Setting | Default | Expects | Meaning |", "|---|---|---|---|"]
    inner: list[str] = []
    for name, field in section.model_fields.items():
        below = section_of(field.annotation)
        if below is not None and not sections:
            continue
        lines.append(f"| `{prefix}{name}` | {_default(field)} | {describe_field(field)} | {_cell(field.description)} |")
        if below is not None:
            inner += ["", f"Each item of `{prefix}{name}`: {_sentence(below.__doc__)}", "", _table(below, "", True)]
    return "\n".join([*lines, *inner]) + "\n"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return f"`{_inline(field.default)}`"


def _inline(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    return write_yaml(value).removesuffix("...\n").strip()


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


def _cell(text: str | None) -> str:
    return _sentence(text).replace("|", "\\|")
