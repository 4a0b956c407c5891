"""Problems of a configuration: collected with path, value and remedy, and raised together as one error."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ctxlm_ds.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MAX_VALUE_CHARACTERS = 80
MAX_NAME_CHARACTERS = 100


@dataclass(frozen=True, slots=True)
class Problem:
    """One wrong setting or combination."""

    path: str
    """Dotted path of the setting."""
    text: str
    """What is wrong, the value, and what to do."""
    involves: tuple[str, ...] = ()
    """Other settings that the finding depends on."""
    where: str = ""
    """File and line, or command-line option, of the value."""

    def line(self) -> str:
        where = f"  [{self.where}]" if self.where else ""
        return f"{self.path}: {self.text}{where}"


class ProblemsError(ConfigError):
    """Several problems in one error; can be pickled, because ranks send errors to each other."""

    def __init__(self, text: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(text)
        self.problems = tuple(problems)


def raise_problems(title: str, problems: Sequence[Problem]) -> None:
    """Raise one ProblemsError that lists every problem, or return if there are none."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"{title}: {count}", *(f"  {problem.line()}" for problem in problems)]
        raise ProblemsError("\n".join(lines), problems)


def nearest_name(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate most similar to `name` (difflib ratio of at least `cutoff`), or None."""
    if len(name) > MAX_NAME_CHARACTERS:
        return None
    by_folded = {_fold(candidate): candidate for candidate in candidates}
    matches = difflib.get_close_matches(_fold(name), list(by_folded), n=1, cutoff=cutoff)
    return by_folded[matches[0]] if matches else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return `; did you mean X?` for the end of a message, or an empty text if no candidate is similar."""
    near = nearest_name(name, candidates)
    return f"; did you mean {near}?" if near else ""


def explain_error(details: ErrorDetails, known: Iterable[str]) -> str:
    """Return pydantic's error about one value in words; `known` are the settings of its section."""
    if details["type"] == "missing":
        return "missing"
    if details["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown setting{did_you_mean(str(details['loc'][-1]), known)}"
    near = ""
    if details["type"] == "literal_error" and isinstance(details["input"], str):
        near = did_you_mean(details["input"], re.findall("'([^']+)'", details["ctx"]["expected"]))
    return f"{show_value(details['input'])}: {details['msg'].removeprefix('Value error, ')}{near}"


def text_problem(text: str) -> str | None:
    """Return why a text can be neither a name nor a path, or None if it can."""
    if any(ord(character) < 32 or ord(character) == 127 or 0xD800 <= ord(character) < 0xE000 for character in text):
        return f"{ascii(text)[:MAX_VALUE_CHARACTERS]}: control characters and bytes that are not UTF-8 are not allowed"
    if len(text.encode()) > 4095 or any(len(part.encode()) > 255 for part in text.split("/")):
        return f"{show_value(text)}: too long for a file system (255 bytes per name, 4,095 per path)"
    return None


class FromEnvironment(str):
    """A text with values of environment variables, which may be secrets; messages show it as `written`."""

    written: str


def show_value(value: object) -> str:
    """Return a value as a person would write it, cut to one short line."""
    value = getattr(value, "written", value)
    if isinstance(value, str):
        text = f'"{value[:MAX_VALUE_CHARACTERS]}"'
    elif value is None:
        text = "null"
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, dict):
        text = "a section with " + (", ".join(map(str, value)) or "no settings")
    else:
        text = str(value)
    return shortened(text)


def shortened(text: str, most: int = MAX_VALUE_CHARACTERS) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _fold(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")
