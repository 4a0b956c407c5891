"""Replacements of a library's attributes: for a while, and of functions that the library compiles at its import."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._compile


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


def import_dynamo_late() -> None:
    """Keep torch from importing torch._dynamo, a third of a short run, before something compiles.

    torch imports it to keep compiled code out of a function when that function (an optimizer's, a custom operator's) is
    first called. Before something else imports it nothing is compiled, so these functions run as they are.
    """
    if _dynamo_is_imported() or "getattr" in vars(torch._compile):
        return
    # torch's wrapper looks for the marked function by getattr, and a module's global is found before the builtin.
    vars(torch._compile)["getattr"] = _marked_or_plain
    step = torch.optim.Adam.step

    @functools.wraps(step)
    def step_without_dynamo(self: torch.optim.Adam, closure: Callable[[], Any] | None = None) -> Any:
        if _dynamo_is_imported():
            return step(self, closure)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return inspect.unwrap(step)(self, closure)

    torch.optim.Adam.step = step_without_dynamo


def _marked_or_plain(function: Callable[..., Any], *name_and_default: Any) -> Any:
    marked = getattr(function, *name_and_default)
    return function if marked is None and not _dynamo_is_imported() else marked


def _dynamo_is_imported() -> bool:
    return "torch._dynamo" in sys.modules
