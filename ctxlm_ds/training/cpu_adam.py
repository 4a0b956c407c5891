"""DeepSpeed's CPUAdam, rounding every element alike wherever it lies.

Its C++ half takes elements in vectors and the few behind the last whole vector one by one, where the compiler fuses
other multiplications and additions. A weight's rounding would depend on its place in a rank's flat tensor, and the two
copies of a tied embedding, which lie at different places of two pipeline stages, would drift apart.
"""

from __future__ import annotations

from typing import Any

import torch

LANES = 64
"""fp32 elements of the longest vector that any build uses (SVE's 2,048 bits)."""


def round_alike(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer's updates go by whole vectors; without effect on all but DeepSpeed's CPUAdam."""
    operator = getattr(optimizer, "ds_opt_adam", None)
    if operator is not None and not isinstance(operator, WholeVectors):
        optimizer.ds_opt_adam = WholeVectors(operator)


class WholeVectors:
    """The C++ half, the last elements of a tensor padded to a whole vector."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)

    def adam_update(self, *arguments: Any) -> None:
        """As the operator's, whose last four arguments are weights, gradients and both moments: flat, contiguous."""
        *settings, weights, gradients, first, second = arguments
        tensors = [tensor.view(-1) for tensor in (weights, gradients, first, second)]
        length = tensors[0].numel()
        whole = length - length % LANES
        if whole:
            self._operator.adam_update(*settings, *(tensor[:whole] for tensor in tensors))
        if whole == length:
            return
        padded = [tensor.new_zeros(LANES) for tensor in tensors]
        for copy, tensor in zip(padded, tensors, strict=True):
            copy[: length - whole] = tensor[whole:]
        self._operator.adam_update(*settings, *padded)
        for copy, tensor in zip(padded, tensors, strict=True):
            tensor[whole:] = copy[: length - whole]
