"""A row of an operation's table, and the choice of one row.

Each operation has a file with its implementations and a table of them, the preferred first. A new implementation is a
class or function in that file and a row of that table; its name also joins KernelsConfig (recipe/schema.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ctxlm_ds.errors import KernelError


@dataclass(frozen=True)
class Need:
    """What a layer asks of an operation, and the device that computes it."""

    spec: Any
    """The operation's own description of the layer; its file says of which type."""
    device_type: str
    """As in torch.device: `cpu`, `cuda`."""
    dtype: torch.dtype
    """Of the activations."""


def always_runs(need: Need) -> str | None:
    """Name no reason against an implementation."""
    return None


def always_suits(need: Need) -> bool:
    """Let `auto` take an implementation wherever it runs."""
    return True


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation."""

    name: str
    """As in a recipe's `kernels` section."""
    make: Callable[[Need], Any]
    """Returns the function that layers call."""
    why_not: Callable[[Need], str | None] = always_runs
    """Returns the reason why it cannot compute this here, or None."""
    suits: Callable[[Need], bool] = always_suits
    """Returns whether `auto` takes it if it can run; by name it runs in any case."""


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
