"""Parser of another program's command: a line, or a shell script that is read and never run (shell.py).

The command may be the text of `eval`, `bash -c`, a variable or a here-document.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ctxlm_ds.apps.init.shell import Shell, expansions_left
from ctxlm_ds.apps.init.shell_words import SimpleCommand, split_commands
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.problems import text_problem

_MAX_BYTES = 1_000_000
_MAX_NESTED = 3
_PRINTING = {"echo", "printf"}
_RANKS = {"--nproc-per-node", "--nnodes", "--num-gpus", "--num-nodes", "--num-processes"}
AT_RUN_TIME = "known only when the script runs"


@dataclass(slots=True)
class Command:
    """Arguments of a script, as they were written."""

    script: str
    """File name of the script; empty if only arguments were given."""
    given: dict[str, list[str]] = field(default_factory=dict)
    """Values of each argument by canonical name, empty for a flag; the last one wins."""
    typed: dict[str, str] = field(default_factory=dict)
    """Each argument's name as it was written, by canonical name."""
    ranks: int | None = None
    """Ranks that the launcher starts, if it says so."""
    remarks: list[str] = field(default_factory=list)
    """What was not read, or not for sure."""


@dataclass(slots=True)
class _Found:
    """A command of one of the scripts."""

    words: list[str]
    script: str
    launcher: list[str]
    """Words before the script."""
    strays: list[str] = field(default_factory=list)
    """First words of the lines after it that begin with an argument, which a shell takes for commands."""
    branches: bool = False

    @property
    def has_arguments(self) -> bool:
        return any(word.startswith("--") for word in self.words)


def canonical(name: str) -> str:
    """Return an argument's name with `-` in place of `_`."""
    return "--" + name.lstrip("-").replace("_", "-")


def read_command(text_or_file: str, scripts: Sequence[str]) -> Command:
    """Return the arguments of the first of `scripts` in a command, or in a shell script.

    Raises ConfigError if there are no arguments, or the text is not a command.
    """
    is_file = text_problem(text_or_file) is None and Path(text_or_file).is_file()
    text = _read(Path(text_or_file)) if is_file else text_or_file
    place = text_or_file if is_file else "the arguments"
    try:
        found, remarks = _choose(text, scripts)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{place}: not a command of a shell ({why}); give the arguments in one line") from error
    command = Command(found.script, remarks=remarks)
    command.ranks = _count_ranks(found, command.remarks)
    _sort_words(found, command)
    _read_precision(found, command)
    if not command.given:
        raise ConfigError(f"{place}: found no arguments of {' or '.join(scripts)}")
    return command


def _read(path: Path) -> str:
    data = path.read_bytes()[: _MAX_BYTES + 1]
    if len(data) > _MAX_BYTES or b"\0" in data:
        raise ConfigError(f"{path}: not a shell script")
    return data.decode(errors="replace")


def _sort_words(found: _Found, command: Command) -> None:
    """Sort the words into arguments and their values."""
    name = ""
    for word in found.words:
        if word.startswith("--"):
            typed, equals, value = word.partition("=")
            name = canonical(typed)
            command.typed[name] = typed
            command.given[name] = [value] if equals else []
        elif name:
            command.given[name].append(word)
        elif expansions_left(word):
            command.remarks.append(f"{word} before the first argument: {AT_RUN_TIME}; its arguments are not read")


def _read_precision(found: _Found, command: Command) -> None:
    """Take the precision of `accelerate launch`, which the script's own arguments override."""
    words = [word for text in found.launcher for word in text.split("=", 1)]
    for name, value in zip(words, words[1:], strict=False):
        option = canonical(name) if name.startswith("--") else ""
        if option == "--config-file":
            command.remarks.append(f"{name} {value}: not read; give --ranks, and set training.precision")
        elif option == "--mixed-precision" and value in ("fp16", "bf16"):
            if not {"--fp16", "--bf16"} & command.given.keys():
                command.given[f"--{value}"] = []
                command.typed[f"--{value}"] = f"{name} {value}"
        elif option == "--mixed-precision" and value != "no":
            command.remarks.append(f"{name} {value}: fp16 and bf16 are read; set training.precision")


def _choose(text: str, scripts: Sequence[str]) -> tuple[_Found, list[str]]:
    """Return the command whose arguments are read, and remarks about the script."""
    shell = Shell()
    commands = split_commands(text)
    found = [*_find(commands, scripts, shell, _MAX_NESTED)]
    if not found:
        values = [value if isinstance(value, str) else " ".join(value) for value in shell.variables.values()]
        found = [one for value in values for one in _nested(value, scripts, shell, _MAX_NESTED)]
    if not found:
        fresh = Shell()
        return _Found([word for command in commands for word in fresh.read(command)], "", []), []
    with_arguments = [one for one in found if one.has_arguments]
    chosen = (with_arguments or found)[0]
    remarks = []
    if chosen.branches:
        remarks.append("assignments under a condition (if, case, &&, ||) were all read, in order")
    if len(with_arguments) > 1:
        remarks.append(f"the script has {len(with_arguments)} commands of {' and '.join(scripts)}; this is the first")
    remarks += [
        f"{word}: the line before it does not end in \\, so a shell takes it for a command; the line is not read"
        for word in chosen.strays
    ]
    return chosen, remarks


def _find(commands: Sequence[SimpleCommand], scripts: Sequence[str], shell: Shell, depth: int) -> Iterator[_Found]:
    """Read commands in order; yield those that start one of the scripts."""
    previous: _Found | None = None
    for command in commands:
        first = next(iter(command.words), "")
        words = shell.read(command)
        if previous is not None and command.before == "\n" and isinstance(first, str) and first.startswith("-"):
            previous.strays.append(first)
            continue
        previous = None
        if not words or words[0] in _PRINTING:
            continue
        if words[0] == "eval":
            yield from _nested(" ".join(words[1:]), scripts, shell, depth)
            continue
        place = next((place for place, word in enumerate(words) if Path(word).name in scripts), None)
        if place is not None:
            previous = _Found(words[place + 1 :], Path(words[place]).name, words[:place], branches=shell.branches)
            yield previous
            continue
        for text in [*words, *command.documents]:
            yield from _nested(text, scripts, shell, depth)


def _nested(text: str, scripts: Sequence[str], shell: Shell, depth: int) -> Iterator[_Found]:
    """Yield the commands in a text that a shell runs with the variables so far."""
    if depth and any(script in text for script in scripts):
        inner = copy.copy(shell)
        inner.variables = dict(shell.variables)
        with contextlib.suppress(ValueError):  # prose that names the script
            yield from _find(split_commands(text), scripts, inner, depth - 1)


def _count_ranks(command: _Found, remarks: list[str]) -> int | None:
    found, known, launcher = 1, False, command.launcher
    for place, word in enumerate(launcher):
        name, equals, value = word.partition("=")
        value = value if equals else next(iter(launcher[place + 1 :]), "")
        if name.startswith("--") and canonical(name) in _RANKS:
            if value.isdigit():
                found, known = found * max(1, int(value)), True
            else:
                remarks.append(f"{name} {value}: the number of ranks is not known; give --ranks")
        elif expansions_left(word) == [word] and not (place and launcher[place - 1].startswith("-")):
            remarks.append(f"{word} before {command.script}: {AT_RUN_TIME}; give --ranks if it has the number of ranks")
    return found if known else None
