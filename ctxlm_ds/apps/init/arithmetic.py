"""Integer arithmetic of a shell, `$((64 * 4))`: + - * / % ** and parentheses."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(r"\s*(\d+|\w+|\*\*|[-+*/%()])")
_LONGEST = 200
_LARGEST = 1 << 63


def evaluate(text: str, value_of: Callable[[str], str | None]) -> int | None:
    """Return the value of an expression; None if it is not plain arithmetic of integers that are known.

    Args:
        text: the expression, without `$((` and `))`.
        value_of: value of a variable; None if it is not known.
    """
    try:
        tokens = _tokens(text, value_of)
        value = _sum(tokens)
        return None if tokens else value
    except (ValueError, IndexError, ZeroDivisionError):
        return None


def _tokens(text: str, value_of: Callable[[str], str | None]) -> list[str]:
    """Return the tokens, the last one first, with the values of variables."""
    tokens, place, text = [], 0, text.strip()
    if len(text) > _LONGEST:
        raise ValueError("too long")
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ValueError("not arithmetic")
        token, place = match[1], match.end()
        is_name = re.match(r"[^\W\d]", token) is not None
        tokens.append(str(int(value_of(token) or "unknown")) if is_name else token)
    return tokens[::-1]


def _sum(tokens: list[str]) -> int:
    value = _product(tokens)
    while tokens and tokens[-1] in ("+", "-"):
        value = _bounded(value + _product(tokens) if tokens.pop() == "+" else value - _product(tokens))
    return value


def _product(tokens: list[str]) -> int:
    value = _power(tokens)
    while tokens and tokens[-1] in ("*", "/", "%"):
        operator, other = tokens.pop(), _power(tokens)
        if operator == "*":
            value = _bounded(value * other)
            continue
        quotient = abs(value) // abs(other) * (1 if (value < 0) == (other < 0) else -1)
        value = quotient if operator == "/" else value - quotient * other
    return value


def _power(tokens: list[str]) -> int:
    value = _operand(tokens)
    if not tokens or tokens[-1] != "**":
        return value
    tokens.pop()
    exponent = _power(tokens)
    if not 0 <= exponent < 64:
        raise ValueError("exponent out of range")
    return _bounded(value**exponent)


def _operand(tokens: list[str]) -> int:
    token = tokens.pop()
    if token in ("+", "-"):
        return _operand(tokens) if token == "+" else -_operand(tokens)
    if token == "(":
        value = _sum(tokens)
        if tokens.pop() != ")":
            raise ValueError("no closing )")
        return value
    if token[0] == "0" and len(token) > 1:
        raise ValueError("octal")
    return _bounded(int(token))


def _bounded(value: int) -> int:
    if abs(value) >= _LARGEST:
        raise ValueError("larger than a shell's integers")
    return value
