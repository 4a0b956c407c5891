"""Problems of a configuration: collected, each with its path, value and remedy, and raised together.

In: what a loader or check found. Out: one ConfigError. Not here: what counts as a problem.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ctxlm_ds.errors import ConfigError

MAX_VALUE_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    path: str
    """Dotted path of the setting."""
    text: str
    """What is wrong, the value, and what to do."""
    involves: tuple[str, ...] = ()
    """Every setting that the finding rests on (`path` included without saying)."""
    where: str = ""
    """File and line, or the command-line option, that the value came from."""

    def line(self) -> str:
        where = f"  [{self.where}]" if self.where else ""
        return f"{self.path}: {self.text}{where}"


class ProblemsError(ConfigError):
    """Several problems told as one; can be pickled, as every error that ranks tell each other."""

    def __init__(self, text: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(text)
        self.problems = tuple(problems)


def raise_problems(title: str, problems: Sequence[Problem]) -> None:
    """Raise one ProblemsError that lists every problem; nothing happens where there is none."""
    if not problems:
        return
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise ProblemsError("\n".join([f"{title}: {count}", *(f"  {problem.line()}" for problem in problems)]), problems)


def nearest_name(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate most like `name` (a slip of the keyboard, another spelling), or None.

    `cutoff` is the least similarity (difflib's ratio, 0 to 1).
    """
    by_folded = {_fold(candidate): candidate for candidate in candidates}
    matches = difflib.get_close_matches(_fold(name), list(by_folded), n=1, cutoff=cutoff)
    return by_folded[matches[0]] if matches else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The end of a message about an unknown name: `; did you mean X?`, or nothing where no candidate is near."""
    near = nearest_name(name, candidates)
    return f"; did you mean {near}?" if near else ""


def show_value(value: object) -> str:
    """A value as a person would write it, cut to one short line."""
    if isinstance(value, str):
        text = f'"{value}"'
    elif value is None:
        text = "null"
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, dict):
        text = "a section with " + (", ".join(map(str, value)) or "nothing in it")
    else:
        text = str(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 1] + "…"


def _fold(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")
