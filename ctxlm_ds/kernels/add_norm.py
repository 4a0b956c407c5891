"""Residual sum, its norm, and the dropout before or after, as one operation: in steps, or one kernel on a GPU.

Shape letters: h width; `...` any leading dimensions. The spec of a Need is an AddNormSpec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ctxlm_ds.kernels.dropout import DropoutKernel
from ctxlm_ds.kernels.implementation import Implementation


class Drop(NamedTuple):
    """One dropout by key: the arguments of a DropoutKernel after the tensor."""

    p: float
    key: Tensor
    first: int = 0


class AddNormKernel(Protocol):
    """Return the sum z = residual + drop(x) and norm(z), or with `drop_last` z = residual + x and drop(norm(z)).

    x, residual and both results are [..., h] of one type. `parameters` and `eps` are those of the norm after its
    tensor, (weight, bias or None) or (weight,). Without `drop` nothing is dropped.
    """

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        parameters: tuple[Tensor | None, ...],
        eps: float,
        drop: Drop | None = None,
        drop_last: bool = False,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class AddNormSpec:
    """The norm of a layer, and the run's kernels of the steps."""

    kind: str
    """LAYER or RMS (kernels/norm.py)."""
    width: int
    norm: Callable[..., Tensor]
    """A LayerNormKernel or RmsNormKernel."""
    dropout: DropoutKernel


@dataclass(frozen=True)
class AddNormSteps:
    """The operation as a dropout, a sum and a norm, each by the run's kernel."""

    spec: AddNormSpec

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        parameters: tuple[Any, ...],
        eps: float,
        drop: Drop | None = None,
        drop_last: bool = False,
    ) -> tuple[Tensor, Tensor]:
        if drop is not None and not drop_last:
            x = self.spec.dropout(x, *drop)
        z = residual + x
        y = self.spec.norm(z, *parameters, eps)
        return z, y if drop is None or not drop_last else self.spec.dropout(y, *drop)


IMPLEMENTATIONS = (Implementation("torch", lambda need: AddNormSteps(need.spec)),)
