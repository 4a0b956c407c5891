"""YAML as a recipe means it: plain data, the line of every key, no surprises of YAML 1.1.

`6e-4` is a number, `no` and `on` are words, a date is text, `010` is ten, a key written twice is an error.
In: text. Out: data and line numbers. Not here: which keys a recipe may hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from ctxlm_ds.errors import ConfigError

Path = tuple[str | int, ...]
PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class _RecipeLoader(yaml.SafeLoader):
    """A safe loader with the few scalar forms that people expect."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


def _construct_int(loader: _RecipeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node).replace("_", ""))


def _construct_float(loader: _RecipeLoader, node: yaml.ScalarNode) -> float:
    return float(loader.construct_scalar(node).replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))


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
_RecipeLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_RecipeLoader.add_constructor("tag:yaml.org,2002:float", _construct_float)


@dataclass(slots=True)
class YamlSource:
    """Plain data of one YAML text."""

    data: Any
    """Nested dict, list, str, int, float, bool and None."""
    lines: dict[Path, int] = field(default_factory=dict)
    """Line (from 1) of every key and item, by its path."""
    problems: list[tuple[Path, int, str]] = field(default_factory=list)
    """Keys that cannot be read: path, line, reason."""


def read_yaml(text: str, name: str) -> YamlSource:
    """Read one YAML document.

    Args:
        text: the document.
        name: how messages call it (a file's path, or an option).

    Raises:
        ConfigError: the text is not YAML; the message has the line and column.
    """
    loader = _RecipeLoader(text)
    source = YamlSource(data=None)
    try:
        node = loader.get_single_node()
        if node is not None:
            source.data = _plain(loader, node, (), source, frozenset())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{name}{place}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{name}: a value cannot be read: {error}") from error
    finally:
        loader.dispose()
    return source


def _plain(loader: _RecipeLoader, node: yaml.Node, path: Path, source: YamlSource, above: frozenset[int]) -> Any:
    if id(node) in above:
        source.problems.append((path, node.start_mark.line + 1, "an anchor that holds itself"))
        return None
    above = above | {id(node)}
    if not isinstance(node, yaml.ScalarNode) and node.tag not in PLAIN_TAGS:
        source.problems.append((path, node.start_mark.line + 1, f"the tag {node.tag} has no place in a recipe"))
        return None
    if isinstance(node, yaml.MappingNode):
        return _plain_mapping(loader, node, path, source, above)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, child in enumerate(node.value):
            source.lines[(*path, index)] = child.start_mark.line + 1
            items.append(_plain(loader, child, (*path, index), source, above))
        return items
    value = loader.construct_object(node)
    if value is not None and not isinstance(value, (str, int, float, bool)):
        source.problems.append((path, node.start_mark.line + 1, f"the tag {node.tag} has no place in a recipe"))
        return None
    return value


def _plain_mapping(
    loader: _RecipeLoader, node: yaml.MappingNode, path: Path, source: YamlSource, above: frozenset[int]
) -> dict[str, Any]:
    own_keys = {id(key) for key, _ in node.value}
    loader.flatten_mapping(node)
    mapping: dict[str, Any] = {}
    written: set[str] = set()
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            source.problems.append((path, line, "a key must be a word"))
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
    """Quotes every text that a reader of YAML 1.1 or of recipes would take for something else."""

    yaml_implicit_resolvers = {key: list(rules) for key, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, (_pattern, _first) in _RESOLVERS.items():
    _RecipeDumper.add_implicit_resolver(_tag, re.compile(_pattern), _first)


def write_yaml(data: Any) -> str:
    """Plain data as YAML that `read_yaml` reads back equal."""
    return yaml.dump(data, Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=120)
