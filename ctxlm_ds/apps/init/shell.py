"""Variables of a shell script in the order of its assignments, and the words that expansions give.

Nothing is run: `$(...)` other than `$(pwd)`, positional parameters and variables that the script does not set stay in
the words as they are written. Each branch of `if` and `case` is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ctxlm_ds.apps.init.arithmetic import evaluate
from ctxlm_ds.apps.init.shell_words import Array, SimpleCommand, unit_end
from ctxlm_ds.errors import ConfigError

MAX_CHARACTERS = 10_000_000
"""Most characters of all values of a script."""
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?:\[[@*]\])?\}")
_DEFAULT = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(:?-)(.*)\}", re.DOTALL)
_EACH = re.compile(r"\"\$(?:\{\w+\[@\](?::?-)?\}|@)\"")
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_DECLARING = {"export", "local", "declare", "readonly", "typeset"}
_KEYWORDS = {"if", "then", "elif", "else", "do", "while", "until", "{", "!", "time"}
_OPENING, _CLOSING = {"if", "case"}, {"fi", "esac"}
_LEFT = re.compile(r"\$\([^()\s]*\)|\$\(\(.*?\)\)|\$\{[^{}]*\}|\$(?:\w+|[@*#?!$-])|`[^`]*`")


def expansions_left(text: str) -> list[str]:
    """Return the expansions that a word still has, each once."""
    return [*dict.fromkeys(_LEFT.findall(text))]


class _Fields:
    """Words that are being put together; spaces of unquoted expansions separate them."""

    def __init__(self, splits: bool) -> None:
        self.done: list[str] = []
        self._splits = splits
        self._open: list[str] | None = None

    def add(self, text: str) -> None:
        if self._open is None:
            self._open = []
        self._open.append(text)

    def end(self) -> None:
        if self._open is not None:
            self.done.append("".join(self._open))
        self._open = None

    def add_split(self, text: str) -> None:
        if not self._splits:
            self.add(text)
            return
        for part in re.split(r"(\s+)", text):
            if part and part.isspace():
                self.end()
            elif part:
                self.add(part)

    def add_each(self, texts: list[str]) -> None:
        if not self._splits:
            self.add(" ".join(texts))
            return
        for place, text in enumerate(texts):
            if place:
                self.end()
            self.add(text)


class Shell:
    """Variables at a place of a script."""

    def __init__(self) -> None:
        self.variables: dict[str, str | list[str]] = {"HOME": str(Path.home()), "PWD": str(Path.cwd())}
        self.branches = False
        """Whether an assignment was read that runs under a condition only."""
        self._depth = 0
        self._characters = 0

    def read(self, command: SimpleCommand) -> list[str]:
        """Take over the assignments of a command; return its words, expanded, if it is more than assignments."""
        words = [*command.words]
        while words and isinstance(words[0], str) and words[0] in _KEYWORDS | _OPENING | _CLOSING:
            word = words.pop(0)
            self._depth = max(0, self._depth + (word in _OPENING) - (word in _CLOSING))
        declares = bool(words) and isinstance(words[0], str) and words[0] in _DECLARING
        assignments = [*self._assignments(words[1:] if declares else words, declares)]
        if command.before == "((":
            self._forget(assignments)
            return []
        if declares or len(assignments) == len(words):
            self.branches |= bool(assignments) and (self._depth > 0 or command.before in ("&&", "||"))
            for name, appends, value in assignments:
                self._assign(name, appends, value)
            return []
        return [field for word in words[len(assignments) :] if isinstance(word, str) for field in self.fields(word)]

    def _forget(self, assignments: Iterable[tuple[str, bool, str | Array]]) -> None:
        """Drop what an arithmetic command `((N = 8 * 2))` sets, which is not computed."""
        for name, _, _ in assignments:
            self.variables.pop(name, None)

    def _assignments(self, words: list[str | Array], declares: bool) -> Iterator[tuple[str, bool, str | Array]]:
        for word in words:
            match = _ASSIGNMENT.fullmatch(word) if isinstance(word, str) else None
            if isinstance(word, Array):
                yield word.name, word.appends, word
            elif match:
                yield match[1], bool(match[2]), match[3]
            elif not declares and not word.startswith("-"):
                return

    def _assign(self, name: str, appends: bool, value: str | Array) -> None:
        new: str | list[str]
        if isinstance(value, Array):
            new = [field for word in value.words for field in self.fields(word)]
        else:
            new = self.text(value)
        old = self.variables.get(name) if appends else None
        if isinstance(old, list):
            new = [*old, *new] if isinstance(new, list) else [*old[:-1], "".join([*old[-1:], new])]
        elif old is not None:
            new = [old, *new] if isinstance(new, list) else old + new
        self._count(new)
        self.variables[name] = new

    def _count(self, texts: str | list[str]) -> None:
        self._characters += len(texts) if isinstance(texts, str) else sum(map(len, texts)) + len(texts)
        if self._characters > MAX_CHARACTERS:
            raise ConfigError(f"the script's variables have more than {MAX_CHARACTERS:,} characters")

    def fields(self, word: str) -> list[str]:
        """Return the words that a word as written gives."""
        fields = _Fields(splits=True)
        self._expand(word, fields, in_quotes=False)
        fields.end()
        self._count(fields.done)
        return fields.done

    def text(self, word: str) -> str:
        """Return the text of a word as written, as an assignment takes it."""
        fields = _Fields(splits=False)
        self._expand(word, fields, in_quotes=False)
        fields.end()
        return "".join(fields.done)

    def _expand(self, text: str, fields: _Fields, in_quotes: bool) -> None:
        place = 0
        while place < len(text):
            end = unit_end(text, place, in_quotes)
            unit, place = text[place:end], end
            if unit[0] == "\\":
                kept = unit if in_quotes and unit[1:] not in ("$", "`", '"', "\\", "\n") else unit[1:]
                fields.add("" if kept == "\n" else kept)
            elif unit[0] == "'" and not in_quotes:
                fields.add(unit[1:-1])
            elif unit[0] == '"' and not in_quotes:
                if not _EACH.fullmatch(unit):
                    fields.add("")
                self._expand(unit[1:-1], fields, in_quotes=True)
            elif unit.startswith("$'") and not in_quotes:
                fields.add(re.sub(r"\\(['\"\\])", r"\1", unit[2:-1]))
            elif unit[0] == "`" or (unit[0] == "$" and len(unit) > 1):
                self._substitute(unit, fields, in_quotes)
            else:
                fields.add(unit)

    def _substitute(self, unit: str, fields: _Fields, in_quotes: bool) -> None:
        value = self._value(unit)
        if value is None:
            fields.add(_as_written(unit))
        elif isinstance(value, list) and in_quotes and _EACH.fullmatch(f'"{unit}"'):
            fields.add_each(value)
        else:
            value = " ".join(value) if isinstance(value, list) else value
            (fields.add if in_quotes else fields.add_split)(value)

    def _value(self, unit: str) -> str | list[str] | None:
        """Return the value of an expansion; None if it is not known without running the script."""
        variable, default = _VARIABLE.fullmatch(unit), _DEFAULT.fullmatch(unit)
        if variable:
            return self.variables.get(variable[1] or variable[2])
        if default:
            value = self.variables.get(default[1])
            return value if value or (value is not None and default[2] == "-") else self.text(default[3])
        if unit.startswith("$((") and unit.endswith("))"):
            number = evaluate(self.text(unit[3:-2]), self._scalar)
            return None if number is None else str(number)
        return str(Path.cwd()) if unit.strip("$()` ") == "pwd" else None

    def _scalar(self, name: str) -> str | None:
        value = self.variables.get(name)
        return value if isinstance(value, str) else None


def _as_written(unit: str) -> str:
    """Return an expansion without spaces, so that it stays one word."""
    if (unit.startswith("$(") and not unit.startswith("$((")) or unit[0] == "`":
        words = unit.rstrip(")`").lstrip("$(`").split() or [""]
        word = words[0] + ("..." if len(words) > 1 else "")
        return f"`{word}`" if unit[0] == "`" else f"$({word})"
    return "".join(unit.split())
