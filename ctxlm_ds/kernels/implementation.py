"""One implementation of an operation, and the choice of one.

Each operation has a file with its implementations and a table of them, the preferred first. A new implementation is a
class or function in that file, a row of that table, and a name in KernelsConfig (recipe/schema.py). Other packages
register a row as an entry point; `auto` never takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ctxlm_ds.errors import KernelError


@dataclass(frozen=True)
class Need:
    """The request of a layer for an operation, and the device that computes it."""

    spec: Any
    """Description of the layer; its type is in the operation's file."""
    device_type: str
    """torch's name: `cpu`, `cuda`."""
    dtype: torch.dtype
    """Type of the activations."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation."""

    name: str
    """Name in a recipe's `kernels` section."""
    make: Callable[[Need], Any]
    """Returns the function that layers call."""
    why_not: Callable[[Need], str | None] = lambda need: None
    """Returns the reason why it cannot compute this here, or None."""
    suits: Callable[[Need], bool] = lambda need: True
    """Returns whether `auto` takes it if it can run; if the recipe names it, it is taken in any case."""


def choose(operation: str, asked: str, table: Sequence[Implementation], need: Need) -> Implementation:
    """Return the row that `asked` names, or for `auto` the first that suits and runs.

    Raises:
        KernelError: the named one cannot run; the message has the reason and what `auto` would take.
    """
    if asked == "auto":
        return next(row for row in table if row.suits(need) and row.why_not(need) is None)
    chosen = next(row for row in table if row.name == asked)
    problem = chosen.why_not(need)
    if problem is None:
        return chosen
    automatic = choose(operation, "auto", table, need).name
    raise KernelError(
        f"kernels.{operation}: `{asked}` cannot run here: {problem}. "
        f"Set kernels.{operation} to `auto` (`{automatic}` here)."
    )
