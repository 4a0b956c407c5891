"""Norms over the width as modules: LayerNorm and RMSNorm.

Shape letters: h width; `...` any leading dimensions. Under sequence parallelism a norm sees this rank's tokens only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.mappings import share_parameters
from ctxlm_ds.parallel.parameters import ONES, ZEROS, ParameterFacts, declare


class LayerNorm(nn.Module):
    """LayerNorm over the width, computed by a kernel."""

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
        self.kernel = kernels.layer_norm
        self.parallel = parallel or ParallelContext()

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., h]."""
        if self.bias is None:
            (weight,) = share_parameters(self.parallel, self.weight)
            return self.kernel(x, weight, None, self.eps)
        weight, bias = share_parameters(self.parallel, self.weight, self.bias)
        return self.kernel(x, weight, bias, self.eps)


class RMSNorm(LayerNorm):
    """RMSNorm over the width (Zhang & Sennrich 2019, arXiv:1910.07467), computed by a kernel; it has no bias."""

    def __init__(self, width: int, eps: float, kernels: KernelSet, parallel: ParallelContext | None = None) -> None:
        super().__init__(width, eps, kernels, parallel, bias=False)
        self.rms_kernel = kernels.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """Divide x [..., h] by the root of its mean square."""
        (weight,) = share_parameters(self.parallel, self.weight)
        return self.rms_kernel(x, weight, self.eps)
