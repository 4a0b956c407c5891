"""What an objective is to the rest of the system: the fields of a batch, their corruption, and the terms of the loss.

An objective is one file: its settings (an ObjectiveSection without torch and numpy) and an Objective; compiled loops
are imported when they run. One line of registry.py names it. Loader, engine, evaluation, preview and export loop over
`fields` and `terms` and know no name of either.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ctxlm_ds.recipe.sections import ObjectiveSection

if TYPE_CHECKING:
    from numpy.typing import NDArray


VOCABULARY_SUMS = "ctxlm_ds.parallel.cross_entropy:vocabulary_sums"
CLASSIFICATION_SUMS = "ctxlm_ds.parallel.cross_entropy:classification_sums"


@dataclass(frozen=True)
class Field:
    """One field of a micro-batch: a tensor [rows, columns] of constant shape."""

    name: str
    columns: int
    fill: int | float = 0
    """Value of empty places."""
    dtype: Literal["int64", "float32"] = "int64"


@dataclass(frozen=True)
class LossTerm:
    """One term of the loss: a sum over the global batch divided by a global count, times a weight."""

    name: str
    outputs: tuple[str, ...]
    """Tensors of the model that the reduction takes, in this order."""
    labels: tuple[str, ...]
    """Fields of the batch, or further outputs of the model, that the reduction takes, in this order."""
    reduce: str = VOCABULARY_SUMS
    """`module:function` from (outputs, labels, ParallelContext) to Sums."""
    weight: float = 1.0
    count: Callable[[Mapping[str, NDArray[Any]]], int] | None = None
    """Counts what the sum is divided by, from the fields of a micro-batch before it is computed; None counts the
    labels of labels[0] that are not IGNORE_LABEL."""
    has_accuracy: bool = True
    """Whether the reduction counts right predictions."""
    has_perplexity: bool = False
    """Whether evaluation reports exp(loss) as `perplexity`."""


class Objective(ABC):
    """What a model learns to predict."""

    name: ClassVar[str]
    section: ClassVar[type[ObjectiveSection]]
    outputs: ClassVar[tuple[str, ...]]
    """Tensors that it needs from the model."""
    needs_pairs: ClassVar[bool] = False
    """Whether samples must have a second segment and its label."""
    shifted: ClassVar[bool] = False
    """Whether a sample's last token must be a label only."""

    terms: tuple[LossTerm, ...]
