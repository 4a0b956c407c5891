"""Numbers of words in recipes: `10M`, ranges of them, and steps that follow from a budget in words."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

from ctxlm_ds.recipe.sections import PositiveInt

STEPS_FOLLOW = 10**9
"""Value of training.max_steps until the start of a run has found out how many words a step reads."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_NUMBER = r"(\d{1,15}[KMB]?)"
_RANGE = re.compile(rf"{_NUMBER}\.\.{_NUMBER} by {_NUMBER}")
_MOST_VALUES = 1000


def parse_words(value: Any) -> Any:
    """Return `10M` as a number; another value is returned as it is, to be refused."""
    if not isinstance(value, str) or re.fullmatch(_NUMBER, value) is None:
        return value
    digits = value.rstrip("KMB")
    return int(digits) * _UNITS[value[len(digits) :]]


def parse_word_list(value: Any) -> Any:
    """Return a list of numbers, `10M` and `1M..10M by 1M` (both ends included) as ascending numbers.

    Raises ValueError for a range of too many numbers or of none.
    """
    if not isinstance(value, list):
        return value
    found: list[Any] = []
    for one in value:
        match = _RANGE.fullmatch(one) if isinstance(one, str) else None
        first, last, step = map(parse_words, match.groups()) if match else (0, 0, 0)
        numbers = range(first, last + 1, step) if step else [parse_words(one)]
        if len(numbers) > _MOST_VALUES:
            raise ValueError(f"{one}: gives more than {_MOST_VALUES} checkpoints; give a larger step")
        if not numbers:
            raise ValueError(f"{one}: gives no checkpoint; the smaller number comes first")
        found += numbers
    return sorted(set(found)) if all(isinstance(one, int) for one in found) else found


def short_words(words: int) -> str:
    """`10000000` -> `10M`; a number that no unit divides is written in full."""
    unit = next(unit for unit, size in reversed(_UNITS.items()) if words % size == 0)
    return f"{words // _UNITS[unit]}{unit}"


def let_steps_follow(recipe: dict[str, Any]) -> dict[str, Any]:
    """Set training.max_steps to STEPS_FOLLOW in a recipe without it whose budget in words or phases give it."""
    training = recipe.get("training") or {}
    follows = isinstance(training, dict) and (training.get("max_words") is not None or recipe.get("phases"))
    if follows and training.get("max_steps") is None:
        return {**recipe, "training": {**training, "max_steps": STEPS_FOLLOW}}
    return recipe


Words = Annotated[PositiveInt, BeforeValidator(parse_words)]
WordList = Annotated[list[PositiveInt], BeforeValidator(parse_word_list)]
