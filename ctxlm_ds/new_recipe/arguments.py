"""Parser of another program's command: a line, or a shell script that is read and never run.

Understands continued lines, comments, assignments (`A=1`, `A="..."`, `A=(...)`), `$A`, `${A}`, `${A[@]}` and
`${A:-default}`. Everything else of a shell script is left as it is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.problems import text_problem

_MAX_BYTES = 1_000_000
_MAX_EXPANSIONS = 20
_ARRAY = re.compile(r"^[ \t]*(?:export[ \t]+)?(\w+)\+?=\(((?:[^()]|\([^()]*\))*)\)", re.MULTILINE)
_SCALAR = re.compile(
    r"""^[ \t]*(?:export[ \t]+)?(\w+)=("(?:[^"\\]|\\.)*"|'[^']*'|[^\s;#]*)[ \t]*(?:;|\#[^\n]*)?$""",
    re.MULTILINE | re.DOTALL,
)
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)")
_END_OF_COMMAND = {";", "&&", "||", "|", "&", ">", ">>", "<", "2>&1", "&>", "2>"}
_RANKS = {"--nproc-per-node", "--nnodes", "--num-gpus", "--num-nodes"}


@dataclass(slots=True)
class Command:
    """Arguments of a script, as they were written."""

    script: str
    """File name of the script; empty if only arguments were given."""
    given: dict[str, list[str]] = field(default_factory=dict)
    """Values of each argument by canonical name, empty for a flag; the last one wins."""
    ranks: int | None = None
    """Ranks that the launcher starts, if it says so."""


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
        words, script, launcher = _find_command(text, scripts)
    except ValueError as error:
        raise ConfigError(f"{place}: not a command of a shell ({error}); give the arguments in one line") from error
    command = Command(script, ranks=_count_ranks(launcher))
    name = ""
    for word in words:
        if word in _END_OF_COMMAND:
            break
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            name = canonical(name)
            command.given[name] = [value] if equals else []
        elif name:
            command.given[name].append(word)
    if not command.given:
        raise ConfigError(f"{place}: found no arguments of {' or '.join(scripts)}")
    return command


def _read(path: Path) -> str:
    data = path.read_bytes()[: _MAX_BYTES + 1]
    if len(data) > _MAX_BYTES or b"\0" in data:
        raise ConfigError(f"{path}: not a shell script")
    return data.decode(errors="replace")


def _find_command(text: str, scripts: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Return the words after the script, its name, and the words before it."""
    text = text.replace("\\\r\n", " ").replace("\\\n", " ")
    text = re.sub(r"^[ \t]*#.*$", "", text, flags=re.MULTILINE)
    variables = {name: _quoted(value) for name, value in _SCALAR.findall(text)}
    variables |= {name: " ".join(value.split("\n")) for name, value in _ARRAY.findall(text)}
    lines = [_expand(line, variables) for line in _SCALAR.sub("", _ARRAY.sub("", text)).splitlines()]
    lines += [_expand(value, variables) for value in variables.values()]
    for line in lines:
        if not any(script in line for script in scripts):
            continue
        words = shlex.split(line, comments=True)
        for place, word in enumerate(words):
            if Path(word).name in scripts:
                return words[place + 1 :], Path(word).name, words[:place]
    written = text if "=" in text.partition("--")[0] or "$" in text else text.replace("\n", " ")
    return shlex.split(_expand(written, variables), comments=True), "", []


def _quoted(value: str) -> str:
    """Return a scalar's text; inside quotes, line ends are spaces."""
    return value[1:-1].replace("\n", " ") if value[:1] in ("'", '"') and len(value) > 1 else value


def _expand(text: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name, match[2] if match[2] is not None else match[0])

    for _ in range(_MAX_EXPANSIONS):
        expanded = _VARIABLE.sub(value, text)
        if expanded == text or len(expanded) > _MAX_BYTES:
            break
        text = expanded
    return text


def _count_ranks(launcher: Sequence[str]) -> int | None:
    found = 1
    known = False
    for place, word in enumerate(launcher):
        name, equals, value = word.partition("=")
        value = value if equals else next(iter(launcher[place + 1 :]), "")
        if name.startswith("--") and canonical(name) in _RANKS and value.isdigit():
            found, known = found * max(1, int(value)), True
    return found if known else None
