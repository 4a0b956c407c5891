"""Whether stored parameters are those of a model: names and shapes."""

from __future__ import annotations

from collections.abc import Mapping

from ctxlm_ds.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]


def check_parameters(found: Shapes, expected: Shapes, message: str) -> None:
    """Compare names and shapes of parameters with those of a model.

    Raises:
        CheckpointError: `message` and every parameter that is missing, unknown or of another shape.
    """
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unknown" for name in found if name not in expected]
    problems += [
        f"{name} has shape {found[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        raise CheckpointError(f"{message}: {'; '.join(problems)}")
