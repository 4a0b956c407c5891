"""Replacements of a library's attributes: for a while, and of functions that the library compiles at its import."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Override an attribute of one object or module."""
    missing = object()
    before = vars(holder).get(name, missing)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(holder, name)
        else:
            setattr(holder, name, before)


def compile_at_first_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch compiles when it is first called, because compiling imports inductor."""
    compiled = functools.cache(lambda: torch.compile(function))

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return compiled()(*arguments, **named)

    return call
