"""Simple commands and words of a shell script, by the shell's rules for quotes, comments and operators."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NAME = re.compile(r"\$(?:\w+|[@*#?!$-])")
_ARRAY_NAME = re.compile(r"\w+\+?=")
_ANSI_QUOTED = re.compile(r"\$'(?:[^'\\]|\\.)*'", re.DOTALL)
_OPERATOR = re.compile(r"<<<|<<-|<<|<&|<|&>>|&>|>>|>&|>\||>|;;&|;;|;&|;|&&|&|\|\||\|&|\||\(\(|\(|\)")
_OPERATOR_STARTS = "<>;&|()"


@dataclass(slots=True)
class Array:
    """Assignment of an array, `NAME=(...)` or `NAME+=(...)`; words are as written."""

    name: str
    appends: bool
    words: list[str]


@dataclass(slots=True)
class SimpleCommand:
    """Words of a command as written, without its redirections."""

    before: str = "\n"
    """Operator between the previous command and this one."""
    words: list[str | Array] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    """Texts of its here-documents."""


def unit_end(text: str, start: int, in_quotes: bool = False) -> int:
    """Return the end of the character, quoted text or expansion that begins at `start`.

    Raises ValueError if a quote or bracket is not closed.
    """
    first = text[start]
    if first == "\\":
        return min(start + 2, len(text))
    if first == "'" and not in_quotes:
        end = text.find("'", start + 1)
        if end < 0:
            raise ValueError("no closing '")
        return end + 1
    if text.startswith("$'", start) and not in_quotes:
        quoted = _ANSI_QUOTED.match(text, start)
        if quoted is None:
            raise ValueError("no closing '")
        return quoted.end()
    if first == '"' and not in_quotes:
        return _closed(text, start + 1, "", '"', in_quotes=True)
    if first == "`":
        return _closed(text, start + 1, "", "`", in_quotes=True)
    if text.startswith("$(", start):
        return _closed(text, start + 2, "(", ")")
    if text.startswith("${", start):
        return _closed(text, start + 2, "{", "}")
    name = _NAME.match(text, start)
    return name.end() if name else start + 1


def _closed(text: str, place: int, opening: str, closing: str, in_quotes: bool = False) -> int:
    depth = 1
    while place < len(text):
        if text[place] == closing:
            depth -= 1
            if not depth:
                return place + 1
        depth += text[place] == opening
        place = unit_end(text, place, in_quotes)
    raise ValueError(f"no closing {closing}")


def split_commands(text: str) -> list[SimpleCommand]:
    """Return the commands of a script in order.

    Raises ValueError if a quote or bracket is not closed.
    """
    reader = _Reader(text.replace("\r\n", "\n"))
    while reader.place < len(reader.text):
        reader.step()
    reader.end_command("\n")
    return reader.commands


class _Reader:
    """Place in the text and the command that is being read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0
        self.commands: list[SimpleCommand] = []
        self._command = SimpleCommand()
        self._redirection = ""
        """Redirection whose target is the next word."""
        self._documents: list[tuple[SimpleCommand, str, bool]] = []
        """Here-documents that begin after this line: command, delimiter, whether tabs are removed."""

    def end_command(self, operator: str) -> None:
        if self._command.words or self._command.documents:
            self.commands.append(self._command)
        elif operator == "\n" and self._command.before != "\n":
            return
        self._command, self._redirection = SimpleCommand(operator), ""

    def step(self) -> None:
        """Read a space, comment, operator, line end or word."""
        if self._skip_space(" \t"):
            return
        if self.text[self.place] == "\n":
            self.end_command("\n")
            self.place += 1
            self._read_documents()
            return
        if self.text.startswith(("<(", ">("), self.place):
            start, self.place = self.place, _closed(self.text, self.place + 2, "(", ")")
            self._take(self.text[start : self.place])
            return
        operator = _OPERATOR.match(self.text, self.place)
        if operator:
            self.place = operator.end()
            if operator[0][0] in "<>" or operator[0].startswith("&>"):
                self._redirection = operator[0]
            else:
                self.end_command(operator[0])
            return
        self._take(self._word(" \t\n" + _OPERATOR_STARTS))

    def _skip_space(self, spaces: str) -> bool:
        start = self.place
        if self.text[start] in spaces:
            self.place += 1
        elif self.text.startswith("\\\n", start):
            self.place += 2
        elif self.text[start] == "#":
            end = self.text.find("\n", start)
            self.place = len(self.text) if end < 0 else end
        return self.place > start

    def _word(self, stops: str) -> str:
        start = self.place
        while self.place < len(self.text) and self.text[self.place] not in stops:
            self.place = unit_end(self.text, self.place)
        return self.text[start : self.place]

    def _take(self, word: str) -> None:
        following = self.text[self.place : self.place + 1]
        if self._redirection:
            if self._redirection in ("<<", "<<-"):
                delimiter = re.sub(r"[\"'\\]", "", word)
                self._documents.append((self._command, delimiter, self._redirection == "<<-"))
            self._redirection = ""
        elif following == "(" and _ARRAY_NAME.fullmatch(word):
            self.place += 1
            self._command.words.append(Array(word.rstrip("+="), "+" in word, self._array()))
        elif not (following in ("<", ">") and word.isdigit()):
            self._command.words.append(word)

    def _array(self) -> list[str]:
        words: list[str] = []
        while self.place < len(self.text):
            if self.text[self.place] == ")":
                self.place += 1
                return words
            if not self._skip_space(" \t\n"):
                words.append(self._word(" \t\n)"))
        raise ValueError("no closing )")

    def _read_documents(self) -> None:
        for command, delimiter, without_tabs in self._documents:
            lines = []
            while self.place < len(self.text):
                end = self.text.find("\n", self.place)
                line = self.text[self.place :] if end < 0 else self.text[self.place : end]
                self.place = len(self.text) if end < 0 else end + 1
                line = line.lstrip("\t") if without_tabs else line
                if line == delimiter:
                    break
                lines.append(line)
            command.documents.append("\n".join(lines))
        self._documents = []
