"""The schema in words: what a setting expects, which settings there are, which one was meant; the reference of all.

In: the pydantic classes of schema.py; a raw recipe, which chooses among those of the registry. Out: texts and names,
docs/config.md as Markdown. Not here: loading, checking, files.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ctxlm_ds.recipe.choices import CHOICES, Choice, listed
from ctxlm_ds.recipe.problems import nearest_name
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.yaml_source import write_yaml

Path = tuple[str | int, ...]

KNOWN_ELSEWHERE = {
    "lr": "optimizer.learning_rate",
    "adam_epsilon": "optimizer.eps",
    "max_grad_norm": "optimizer.gradient_clipping",
    "clip_grad": "optimizer.gradient_clipping",
    "clip_norm": "optimizer.gradient_clipping",
    "num_hidden_layers": "model.num_layers",
    "num_heads": "model.num_attention_heads",
    "n_layers": "model.num_layers",
    "hidden_dropout_prob": "model.hidden_dropout",
    "attention_probs_dropout_prob": "model.attention_dropout",
    "ffn_hidden_size": "model.intermediate_size",
    "hidden_act": "model.hidden_activation",
    "max_seq_length": "data.seq_length",
    "max_seq_len": "data.seq_length",
    "dupe_factor": "data.num_duplicates",
    "data_path": "data.train",
    "train_data_path": "data.train",
    "valid_data_path": "data.validation",
    "sampling_alpha": "data.temperature",
    "multilang_sampling_alpha": "data.temperature",
    "epochs": "training.max_steps",
    "num_train_epochs": "training.max_steps",
    "mlm_probability": "objective.mask_prob",
    "masked_lm_prob": "objective.mask_prob",
    "whole_word_masking": "objective.whole_word",
    "max_predictions_per_seq": "objective.max_predictions",
    "train_batch_size": "training.global_batch_size",
    "batch_size": "training.global_batch_size",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "per_device_train_batch_size": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size",
    "train_iters": "training.max_steps",
    "num_train_steps": "training.max_steps",
    "bf16": "training.precision",
    "fp16": "training.precision",
    "gradient_checkpointing": "training.activation_checkpointing",
    "lr_decay_style": "schedule.name",
    "lr_scheduler_type": "schedule.name",
    "warmup_ratio": "schedule.warmup_fraction",
    "warmup_proportion": "schedule.warmup_fraction",
    "zero_stage": "deepspeed",
    "save_interval": "checkpoint.interval_steps",
    "eval_interval": "evaluation.interval_steps",
}
"""Names that other systems use, and the setting that is meant."""


def dotted(path: Path) -> str:
    """`("data", "validation", 0, "path")` -> `data.validation[0].path`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class that an annotation stands for, itself or as a list's item, or None."""
    candidates = [annotation, *get_args(annotation)]
    return next((item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)), None)


def all_settings() -> dict[str, FieldInfo]:
    """Return every setting of a recipe (sections themselves left out), by its dotted path, in the schema's order.

    A section that depends on a name has the settings of every entry.
    """
    return dict(_settings_below(RunConfig, ()))


def _settings_below(section: type[BaseModel], path: tuple[str, ...]) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None or get_origin(field.annotation) is list:
            yield ".".join((*path, name)), field
        if inner is None:
            continue
        mark = f"{name}[]" if get_origin(field.annotation) is list else name
        classes = CHOICES[name].classes().values() if _is_choice((*path, name)) else (inner,)
        for one in classes:
            yield from _settings_below(one, (*path, mark))


def _is_choice(path: Path) -> bool:
    return len(path) == 1 and path[0] in CHOICES


def find_field(path: Path, data: Mapping[str, Any]) -> FieldInfo | None:
    """Return the schema's field at a path of a raw recipe; None if there is none."""
    section: type[BaseModel] | None = RunConfig
    field: FieldInfo | None = None
    for depth, part in enumerate(path):
        if isinstance(part, int):
            continue
        if section is None or part not in section.model_fields:
            return None
        field = section.model_fields[part]
        section = section_of(field.annotation)
        if _is_choice(path[: depth + 1]):
            section = CHOICES[part].find(data.get(part))
    return field


def find_section(path: Path, data: Mapping[str, Any]) -> type[BaseModel] | None:
    """Return the section class at a path; None if the path ends in a plain setting or nowhere."""
    if not path:
        return RunConfig
    if _is_choice(path):
        return CHOICES[str(path[0])].find(data.get(str(path[0])))
    field = find_field(path, data)
    return None if field is None else section_of(field.annotation)


def explain_unknown(path: Path, data: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return what to say of an unknown setting (empty if nothing), and the setting that it most likely means."""
    if path == ("pipeline",):
        return "; slurm/route.sh takes what stood here as settings of its own (docs/route.md)", None
    if len(path) == 2 and (note := _note_of_owners(path, data)):
        return f": it is {note}", None
    meant = _meant_setting(path, data)
    if meant is None:
        return "", None
    parts = tuple(meant.split("."))
    note = "" if find_field(parts, data) is not None or "[" in meant else _note_of_owners(parts, data)
    return f"; did you mean {meant}?" + (f" It is {note}" if note else ""), meant


def _note_of_owners(path: Path, data: Mapping[str, Any]) -> str:
    """Return whose setting a path is, if it is one of other families, objectives or formats than the recipe's."""
    choice = CHOICES.get(str(path[0]))
    owners = choice.owners(str(path[-1])) if choice is not None and len(path) == 2 else []
    if choice is None or not owners:
        return ""
    return f"a setting of {listed(owners, 'and')}; {choice.path} is {choice.name(data.get(choice.section))}"


def _meant_setting(path: Path, data: Mapping[str, Any]) -> str | None:
    section = find_section(path[:-1], data)
    key = str(path[-1])
    if section is None:
        return None
    here = list(section.model_fields)
    for cutoff in (0.75, 0.6):
        near = nearest_name(key, here, cutoff)
        if near is not None:
            return dotted((*path[:-1], near))
        if cutoff == 0.75 and (elsewhere := _setting_elsewhere(key, str(path[0]))) is not None:
            return elsewhere
    return None


def _setting_elsewhere(key: str, section: str) -> str | None:
    """Return the setting anywhere that a name means; one of `section` before another of the same name."""
    if key in KNOWN_ELSEWHERE:
        return KNOWN_ELSEWHERE[key]
    by_leaf: dict[str, str] = {}
    for path in sorted(all_settings(), key=lambda path: not path.startswith(f"{section}.")):
        by_leaf.setdefault(path.rsplit(".", 1)[-1], path)
    near = nearest_name(key, by_leaf, 0.85)
    return None if near is None else by_leaf[near].replace("[]", "")


def describe_type(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """What a setting expects, in words: `a whole number above 0 or null`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        return describe_type(inner, _constraints(extra))
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(item) for item in get_args(annotation))
    if origin is Literal:
        return "one of " + ", ".join(str(item) for item in get_args(annotation))
    if origin is list:
        item = describe_type(get_args(annotation)[0])
        return "a list of " + item.replace("a section with", "sections with").removeprefix("a ")
    if origin is tuple:
        items = get_args(annotation)
        return f"a list of {len(items)}: " + ", ".join(describe_type(item) for item in items)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        short = "text or " if hasattr(annotation, "SHORT_FORM") else ""
        return f"{short}a section with {', '.join(annotation.model_fields)}"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return words.get(annotation, str(annotation)) + _describe_bounds(metadata)


def describe_field(field: FieldInfo) -> str:
    """What a field of the schema expects, in words."""
    return describe_type(field.annotation, tuple(field.metadata))


def _constraints(items: list[Any]) -> tuple[Any, ...]:
    return tuple(one for item in items for one in (item.metadata if isinstance(item, FieldInfo) else [item]))


def _describe_bounds(metadata: tuple[Any, ...]) -> str:
    names = ("gt", "ge", "lt", "le")
    shown = {name: f"{getattr(item, name):g}" for item in metadata for name in names if hasattr(item, name)}
    if "ge" in shown and "le" in shown:
        return f" from {shown['ge']} to {shown['le']}"
    words = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
    return "".join(f" {words[name]} {bound}" for name, bound in shown.items())


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
