"""One implementation of an operation, and the choice of one.

Each operation has its implementations and a table of them in one file, the preferred first. A new implementation is a
class or function in that file, a row of that table, and a name in KernelsConfig (recipe/schema.py). Other packages
register a row as an entry point; `auto` never takes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from pathlib import Path
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


def compiled_row(make: Callable[[Need], Any], suits: Callable[[Need], bool] = lambda need: True) -> Implementation:
    """Return the row `compiled` of a table, whose function torch.compile makes."""
    return Implementation("compiled", make, lambda need: why_compiled_cannot_run(need.device_type), suits)


def compile_later(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile makes one kernel of at the first call (some seconds).

    Inside a compiled layer it is the function itself.
    """
    compiled = lru_cache(lambda: torch.compile(function, dynamic=False))

    @wraps(function)
    def call(*arguments: Any) -> Any:
        return function(*arguments) if torch.compiler.is_compiling() else compiled()(*arguments)

    return call


@cache
def tag_compiled_code() -> None:
    """Keep torch.compile from loading code that it stored on disk for other sources of the kernels.

    The key of that code holds the names of the project's operators, but neither their schemas nor their gradients.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    torch.compiler.config.cache_key_tag += f" ctxlm_ds kernels {digest.hexdigest()[:16]}"


def why_compiled_cannot_run(device_type: str) -> str | None:
    """Return the reason, or None if torch.compile can make kernels here."""
    if device_type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "torch.compile needs a C++ compiler on the CPU, and none is found (install g++ or set CXX)"
        return None
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"torch.compile needs triton on {device_type} ({error})"
    return None


def choose(operation: str, asked: str, table: Sequence[Implementation], need: Need) -> Implementation:
    """Return the row that `asked` names, or for `auto` the first that suits and runs.

    Raises KernelError if the named one cannot run, with the reason and what `auto` would take.
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
