"""Reader and writer of YAML as plain data, with the line of every key and without the surprises of YAML 1.1.

`6e-4` is a number, `no` and `on` are text, a date is text, `010` is ten, and a duplicate key is an error.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import yaml

from ctxlm_ds.errors import ConfigError

SettingPath = tuple[str | int, ...]
MAX_CHARACTERS = 250_000
MAX_VALUES = 20_000
MAX_DEPTH = 20
PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class _RecipeLoader(yaml.SafeLoader):
    """A safe loader with the few scalar forms that people expect, and limits on what aliases may expand to."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    num_values = 0

    def count_value(self, depth: int) -> None:
        """Count one value; ValueError if there are too many, or they are too deeply nested."""
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values (aliases are counted each time they are used)")
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Insert merged mappings (`<<`), each of which may have been merged before."""
        super().flatten_mapping(node)
        if len(node.value) > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values (merge keys are counted each time they are used)")


def _construct_number(loader: _RecipeLoader, node: yaml.ScalarNode) -> int | float:
    text = loader.construct_scalar(node).replace("_", "")
    return int(text) if node.tag.endswith(":int") else float(text.replace(".inf", "inf").replace(".nan", "nan"))


_RESOLVERS = {
    "tag:yaml.org,2002:null": (r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    "tag:yaml.org,2002:bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    "tag:yaml.org,2002:int": (r"^[-+]?[0-9][0-9_]*$", list("-+0123456789")),
    "tag:yaml.org,2002:float": (
        r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$",
        list("-+0123456789."),
    ),
    "tag:yaml.org,2002:merge": (r"^<<$", ["<"]),
}
for _tag, (_pattern, _first) in _RESOLVERS.items():
    _RecipeLoader.add_implicit_resolver(_tag, re.compile(_pattern), _first)
for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _RecipeLoader.add_constructor(_tag, _construct_number)


@dataclass(slots=True)
class YamlSource:
    """Content of one YAML document."""

    data: Any
    """Nested dict, list, str, int, float, bool and None."""
    lines: dict[SettingPath, int] = field(default_factory=dict)
    """Line (from 1) of every key and item, by its path."""
    problems: list[tuple[SettingPath, int, str]] = field(default_factory=list)
    """SettingPath, line and reason of every key that cannot be read."""


def read_yaml(text: str, name: str) -> YamlSource:
    """Read one YAML document; messages have the `name` of its file or option.

    Raises ConfigError with line and column if the text is not YAML, too long, or too deeply nested.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{name}: {len(text):,} characters are too long for a recipe (at most {MAX_CHARACTERS:,})")
    try:
        source = _parse(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{name}{place}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{name}: a value cannot be read: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: nested deeper than {MAX_DEPTH} levels") from error
    return YamlSource(deepcopy(source.data), dict(source.lines), list(source.problems))


@lru_cache(maxsize=128)
def _parse(text: str) -> YamlSource:
    """Parse a text, once if many recipes extend it."""
    source = YamlSource(data=None)
    loader = _RecipeLoader(text)
    node = loader.get_single_node()
    if node is not None:
        source.data = _plain(loader, node, (), source, frozenset())
    return source


def _plain(loader: _RecipeLoader, node: yaml.Node, path: SettingPath, source: YamlSource, above: frozenset[int]) -> Any:
    loader.count_value(len(above))
    if id(node) in above:
        source.problems.append((path, node.start_mark.line + 1, "an anchor that contains itself"))
        return None
    above = above | {id(node)}
    if isinstance(node, yaml.MappingNode) and node.tag in PLAIN_TAGS:
        return _plain_mapping(loader, node, path, source, above)
    if isinstance(node, yaml.SequenceNode) and node.tag in PLAIN_TAGS:
        items = []
        for index, child in enumerate(node.value):
            source.lines[(*path, index)] = child.start_mark.line + 1
            items.append(_plain(loader, child, (*path, index), source, above))
        return items
    value = loader.construct_object(node) if isinstance(node, yaml.ScalarNode) else node
    if value is not None and not isinstance(value, (str, int, float, bool)):
        source.problems.append((path, node.start_mark.line + 1, f"the tag {node.tag} is not allowed in a recipe"))
        return None
    return value


def _plain_mapping(
    loader: _RecipeLoader, node: yaml.MappingNode, path: SettingPath, source: YamlSource, above: frozenset[int]
) -> dict[str, Any]:
    own_keys = {id(key) for key, _ in node.value}
    loader.flatten_mapping(node)
    mapping: dict[str, Any] = {}
    written: set[str] = set()
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            source.problems.append((path, line, "a key must be text"))
            continue
        key = str(key_node.value)
        if id(key_node) in own_keys:
            if key in written:
                first = source.lines[(*path, key)]
                source.problems.append(((*path, key), line, f"written twice (first on line {first}); keep one"))
            written.add(key)
        source.lines[(*path, key)] = line
        mapping[key] = _plain(loader, value_node, (*path, key), source, above)
    return mapping


class _RecipeDumper(yaml.SafeDumper):
    """A dumper that quotes every text that YAML 1.1 or a recipe would read as something else."""

    yaml_implicit_resolvers = {key: list(rules) for key, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, (_pattern, _first) in _RESOLVERS.items():
    _RecipeDumper.add_implicit_resolver(_tag, re.compile(_pattern), _first)


def write_yaml(data: Any) -> str:
    """Return plain data as YAML that `read_yaml` reads back unchanged."""
    return yaml.dump(data, Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=120)


def integral_floats_as_ints(value: Any) -> Any:
    """Return a copy in which 1e6 is 1000000, so that it can be used for an integer setting."""
    if isinstance(value, dict):
        return {key: integral_floats_as_ints(item) for key, item in value.items()}
    if isinstance(value, list):
        return [integral_floats_as_ints(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value
