"""One test of a property that many files or values have: it reports all that lack it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for all cases, as pytest.mark.parametrize does, but as one test; fixtures serve all cases."""
    arguments, cases = names.replace(" ", "").split(","), list(cases)

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failures = []
            for case in cases:
                values = case if len(arguments) > 1 else (case,)
                try:
                    test(**dict(zip(arguments, values, strict=True)), **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    failures.append(f"{case!r}: {type(error).__name__}: {error}")
            assert not failures, f"{len(failures)} cases:\n" + "\n".join(failures)

        others = [value for name, value in inspect.signature(test).parameters.items() if name not in arguments]
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run

    return wrap
