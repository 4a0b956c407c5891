"""The part of an objective that the data uses: the fields of a batch, the count of labels, and its loops.

Objectives are built above the data and passed in (objectives/base.py). This module imports only the standard library:
a recipe is checked without numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.text import Text

    from ctxlm_ds.data.sample import Samples
    from ctxlm_ds.recipe.sections import DataSection
    from ctxlm_ds.tokenizers.base import Tokenizer

IGNORE_LABEL = -100
"""The label of a position without a prediction."""
FITS = -1
"""The result of filling if every row fits into its fields; otherwise it is the first row that does not."""


@dataclass(frozen=True)
class Field:
    """One field of a micro-batch: a tensor [rows, columns] of constant shape."""

    name: str
    columns: int
    fill: int | float = 0
    """Value of empty places."""
    dtype: Literal["int64", "float32"] = "int64"


class Term(Protocol):
    """The part of a loss term that the loader uses (objectives/base.LossTerm)."""

    @property
    def name(self) -> str: ...

    @property
    def labels(self) -> tuple[str, ...]: ...

    @property
    def count(self) -> Callable[[Mapping[str, NDArray[Any]]], int] | None: ...


class Objective(Protocol):
    """The part of an objective that the data uses (objectives/base.Objective)."""

    @property
    def terms(self) -> Sequence[Term]: ...

    def fields(self, data: DataSection) -> tuple[Field, ...]: ...

    def budgets(self, lengths: NDArray[np.int64], data: DataSection) -> NDArray[np.int64]: ...

    def corrupt_batch(self, samples: Samples, key: np.uint64, budgets: NDArray[np.int64]) -> Any: ...

    def fill(self, examples: Any, row_starts: NDArray[np.int64], arrays: Mapping[str, NDArray[Any]]) -> int: ...

    def render(self, example: Any, tokenizer: Tokenizer) -> Text: ...
