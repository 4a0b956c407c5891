"""Arguments of another program, the settings that they become, and the recipe that is written with their sources."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ctxlm_ds.atomic import write_text
from ctxlm_ds.console import printable
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.problems import Problem, ProblemsError, raise_problems, shortened
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.yaml_source import read_yaml
from ctxlm_ds.untrusted_json import read_text

_RANKS = {"--nproc-per-node", "--nnodes", "--num-gpus", "--num-nodes", "--num-processes"}
_COMMENT_COLUMN = 40
LARGEST, LONGEST_SOURCE = 1e18, 200
_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*")
NAMES_OF_ENTRIES = ("family", "name", "sample_format")
"""Settings that come first in their sections."""
_RESERVED = {"true", "false", "null", "~", ".inf", ".nan"}


class Setting(NamedTuple):
    """A value of the recipe and where it comes from."""

    value: Any
    source: str
    is_default: bool = False
    """True if the original's default decides, not an argument."""


@cache
def load_table(name: str) -> dict[str, Any]:
    """Return a table of this folder: of another program's arguments, or `sizes`, of shipped recipes by family."""
    path = Path(__file__).resolve().parent / f"{name}.yaml"
    return read_yaml(path.read_text(encoding="utf-8"), str(path)).data


def canonical(name: str) -> str:
    """Return an argument's name with `-` in place of `_`."""
    return "--" + name.lstrip("-").replace("_", "-")


@dataclass(slots=True)
class Translation:
    """Arguments of a script, the settings of the recipe that they become, and notes for the user."""

    script: str
    arguments: dict[str, list[str]] = field(default_factory=dict)
    """Values of each argument by canonical name, empty for a flag; the last one wins."""
    typed: dict[str, str] = field(default_factory=dict)
    """Each argument's name as it was written, by canonical name."""
    ranks: int = 0
    """Ranks that the user or the launcher names; 0 if neither does."""
    table: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    """Dataset prefix that the user names, as `tokenizer` is the folder of the tokenizer."""
    tokenizer: str | None = None
    settings: dict[str, Setting] = field(default_factory=dict)
    without: dict[str, list[str]] = field(default_factory=dict)
    """Arguments that have no setting, by reason."""
    unknown: dict[str, str | None] = field(default_factory=dict)
    """Arguments that the original does not have either, and the nearest that it has."""
    notes: list[str] = field(default_factory=list)

    def add(self, words: Sequence[str]) -> None:
        """Sort words into arguments and their values."""
        name = ""
        for word in words:
            if word.startswith("--"):
                typed, equals, value = word.partition("=")
                name = canonical(typed)
                self.typed[name], self.arguments[name] = typed, [value] if equals else []
            elif name:
                self.arguments[name].append(word)

    def has(self, name: str) -> bool:
        return canonical(name) in self.arguments

    def texts(self, name: str) -> list[str]:
        """Return the values of an argument; empty if it is not given or a flag."""
        return self.arguments.get(canonical(name), [])

    def text(self, name: str) -> str | None:
        """Return the value of an argument; None if it is not given."""
        if self.has(name) and not self.texts(name):
            raise ConfigError(f"{name}: its value is missing")
        return next(iter(self.texts(name)), None)

    def number(self, name: str, default: float | None = None) -> Any:
        """Return the value of an argument as a number; ConfigError if it is something else."""
        text = self.text(name)
        value = default if text is None else plain_value(text)
        if isinstance(value, str) or not abs(value or 0) <= LARGEST:
            raise ConfigError(f"{name} {shortened(str(text))}: expected a number up to {LARGEST:g}")
        return value

    def given(self, *names: str) -> str:
        """Return the given ones of some arguments as they were written."""
        words = [[self.typed[canonical(name)], *self.texts(name)] for name in names if self.has(name)]
        return shortened(" ".join(map(" ".join, words)), LONGEST_SOURCE)

    def source(self, *names: str) -> str:
        """Return the given ones of some arguments, or that their default decides."""
        return self.given(*names) or f"default of {' and '.join(names)}"

    def set(self, key: str, value: Any, source: str, is_default: bool = False) -> None:
        self.settings[key] = Setting(value, source, is_default)

    def value(self, key: str) -> Any:
        """Return a value that is set; None if it is not."""
        setting = self.settings.get(key)
        return None if setting is None else setting.value


def read_words(file: Path) -> list[str]:
    """Read a file of words, in which `\\` joins lines and `#` begins a comment. Raises ConfigError if it cannot."""
    text = read_text(file, ConfigError, 1_000_000).replace("\r\n", "\n").replace("\\\n", " ")
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"{file}: not a list of arguments ({error})") from error


def read_command(words: Sequence[str], scripts: Sequence[str]) -> Translation:
    """Return the arguments after the first word that names one of `scripts`; the words before are its launcher's.

    Raises ConfigError if no script is named, it has no arguments, or a word is one that a shell would replace.
    """
    for word in words:
        if "$" in word or "`" in word:
            advice = "write `echo` before the script's launcher, run it, and give the line that it prints"
            raise ConfigError(f"{word}: scripts are not run, so this has no value; {advice}")
    place = next((place for place, word in enumerate(words) if Path(word).name in scripts), None)
    if place is None:
        raise ConfigError(f"the arguments name none of {', '.join(scripts)}; write that name before them")
    command, launcher = Translation(Path(words[place]).name), Translation("")
    command.add(words[place + 1 :])
    launcher.add(words[:place])
    if not command.arguments:
        raise ConfigError(f"no arguments follow {command.script}")
    for name, values in launcher.arguments.items():
        value = next(iter(values), "")
        if name in _RANKS and value.isdigit():
            command.ranks = (command.ranks or 1) * max(1, int(value))
        elif name == "--mixed-precision" and value in ("fp16", "bf16"):
            if not {"--fp16", "--bf16"} & command.arguments.keys():
                command.arguments[f"--{value}"], command.typed[f"--{value}"] = [], f"{launcher.typed[name]} {value}"
        elif (name, value) != ("--mixed-precision", "no") and name in (*_RANKS, "--mixed-precision", "--config-file"):
            remark = f"{launcher.typed[name]} {value}: not read; give --ranks, and set training.precision"
            command.notes.append(remark)
    return command


def plain_value(text: str) -> int | float | str:
    """Return a number for the text of one, else the text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def recipe_text(head: Sequence[str], settings: Mapping[str, Setting]) -> str:
    """Return a recipe: comment lines, then sections in the schema's order, each value with its source."""
    lines = [f"# {printable(line)}".rstrip() for line in head]
    order = ["extends", *RunConfig.model_fields]
    names = {key.partition(".")[0] for key in settings}
    for name in sorted(names, key=order.index):
        inside = {key.partition(".")[2]: one for key, one in settings.items() if key.startswith(f"{name}.")}
        lines += [f"{name}:"] if inside else _lines(name, settings[name], "")
        for key in sorted(inside, key=lambda key: key not in NAMES_OF_ENTRIES):
            lines += _lines(key, inside[key], "  ")
    return "\n".join(lines) + "\n"


def _lines(key: str, setting: Setting, indent: str) -> list[str]:
    value, comment = setting.value, f"  # {printable(setting.source)}" if setting.source else ""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        head = f"{indent}{key}:".ljust(_COMMENT_COLUMN) + comment
        return [head.rstrip(), *(f"{indent}  - {json.dumps(item)}" for item in value)]
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _RESERVED
    text = value if is_plain else json.dumps(value)
    return [(f"{indent}{key}: {text}".ljust(_COMMENT_COLUMN) + comment).rstrip()]


def check_output(path: Path, force: bool) -> None:
    """Raise ConfigError if a recipe's file exists and `force` is off, or its name is not one of a recipe."""
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; give another --output, or replace it with --force")
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--output {path}: a recipe's name ends in .yaml")


def write_recipe(path: Path, text: str, settings: Mapping[str, Setting] | None = None) -> RunConfig:
    """Write a recipe once it loads; return it. A problem names the source of its setting, not the line.

    Raises ConfigError if the recipe is not valid; then the file stays as it was.
    """
    tried = path.with_name(f".{path.stem}.tried.yaml")  # in its folder, which `extends` may need
    try:
        write_text(tried, text)
        config = load_config(tried)
        os.replace(tried, path)
        return config
    except ConfigError as error:
        if settings is not None and isinstance(error, ProblemsError):
            title = f"{path} is not written, because the recipe would not be valid"
            raise_problems(title, [replace(one, where=_source(one, settings)) for one in error.problems])
        raise ConfigError(str(error).replace(str(tried), str(path))) from None
    finally:
        tried.unlink(missing_ok=True)


def _source(problem: Problem, settings: Mapping[str, Setting]) -> str:
    """Return the source of the first setting that a problem is about."""
    paths = (problem.path, *problem.involves)
    found = (one.source for path in paths for key, one in settings.items() if re.match(rf"{re.escape(key)}\b", path))
    return next(filter(None, found), "")
