"""The fields of a batch, which an objective declares. Imports no numpy: recipes are checked without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from ctxlm_ds.errors import ConfigError

IGNORE_LABEL = -100
"""The label of a position without a prediction."""
MOST_BOUNDARY_TARGETS = 15
"""Tokens of a masked span that are predicted from its boundaries; the rest is left out (SpanBERT)."""
FITS = -1
"""The result of filling if every row fits into its fields; otherwise it is the first row that does not."""

Shared = Literal["positions", "slots", "complete"]


@dataclass(frozen=True)
class Field:
    """One field of a micro-batch: a tensor [rows, columns] of constant shape."""

    name: str
    columns: int
    fill: int | float = 0
    """Value of empty places."""
    dtype: Literal["int64", "float32"] = "int64"
    shared: Shared = field(kw_only=True)
    """What each rank of context parallelism reads: its range of the positions of every row, its range of the slots of
    all rows (labels of predictions), or the complete field (sequences, positions of slots)."""

    def __post_init__(self) -> None:
        if self.shared not in get_args(Shared):
            choices = ", ".join(get_args(Shared))
            raise ConfigError(f"field {self.name} of the objective: shared is {self.shared!r}; choose one of {choices}")
