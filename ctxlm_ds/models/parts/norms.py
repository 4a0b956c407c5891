"""Norms over the width as modules: LayerNorm and RMSNorm.

Shape letters: h width; `...` any leading dimensions. Under sequence parallelism a norm sees this rank's tokens only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.kernels.norm import LAYER, RMS, Drop, DropRuns, in_runs
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.mappings import share_parameters
from ctxlm_ds.parallel.parameters import ONES, ZEROS, ParameterFacts, declare


class LayerNorm(nn.Module):
    """LayerNorm over the width, alone or with the residual sum before it, computed by a kernel."""

    KIND: ClassVar[str] = LAYER

    def __init__(
        self,
        width: int,
        eps: float,
        kernels: KernelSet,
        parallel: ParallelContext | None = None,
        optional: bool = False,
        bias: bool = True,
    ) -> None:
        """Allocate weight and bias; `parallel`: None if every rank has all tokens, `optional`: as in ParameterFacts."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        declare(self, weight=ParameterFacts(ONES, decays=False, optional=optional))
        self.register_parameter("bias", nn.Parameter(torch.empty(width)) if bias else None)
        if bias:
            declare(self, bias=ParameterFacts(ZEROS, decays=False, optional=optional))
        self.eps = eps
        self.kernel: Callable[..., Tensor] = kernels.rms_norm if self.KIND == RMS else kernels.layer_norm
        self.add_kernel = kernels.add_norm(self.KIND, width)
        self.parallel = parallel or ParallelContext()

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        drop: Drop | DropRuns | None = None,
        drop_last: bool = False,
        with_sum: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x [..., h], or its sum with `residual` [..., h]; `with_sum`: return the sum before the result.

        `drop` says what is dropped, of x or with `drop_last` of the result (kernels/norm.py). It is no positional
        argument, because DeepSpeed's hooks change these.
        """
        if residual is None:
            return self.kernel(x, *self._parameters_of_all(), self.eps)
        parameters = self._parameters_of_all()

        def add(x: Tensor, residual: Tensor, drop: Drop | None) -> tuple[Tensor, Tensor]:
            return self.add_kernel(x, residual, parameters, self.eps, drop, drop_last)

        found = in_runs(add, drop, x, residual) if isinstance(drop, list) else add(x, residual, drop)
        return found if with_sum else found[1]

    def _parameters_of_all(self) -> tuple[Tensor | None, ...]:
        """Return the kernel's parameters, whose gradients are those of all tokens."""
        if self.bias is None:
            return *share_parameters(self.parallel, self.weight), None
        return share_parameters(self.parallel, self.weight, self.bias)


class RMSNorm(LayerNorm):
    """RMSNorm over the width (Zhang & Sennrich 2019, arXiv:1910.07467), computed by a kernel; it has no bias."""

    KIND = RMS

    def __init__(self, width: int, eps: float, kernels: KernelSet, parallel: ParallelContext | None = None) -> None:
        super().__init__(width, eps, kernels, parallel, bias=False)

    def _parameters_of_all(self) -> tuple[Tensor | None, ...]:
        return share_parameters(self.parallel, self.weight)
