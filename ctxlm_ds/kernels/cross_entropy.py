"""Cross entropy of some rows of logits and its gradient, for a decoder that never holds the logits of all rows.

The decoder (parallel/cross_entropy.py) computes the logits of some rows, then their loss and gradient, and drops
them. Shape letters: k rows, v words of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ctxlm_ds.kernels.implementation import Implementation, compile_later, compiled_row

LOWEST = torch.finfo(torch.float32).min


class RowStatistics(NamedTuple):
    """fp32 numbers [k] of each row, over the words of this rank."""

    largest: Tensor
    """Largest logit; finite also for a rank without words."""
    word: Tensor
    """The first word that has it, int64, counted from 0 on every rank."""
    total: Tensor
    """Sum of exp(logit - largest)."""
    of_label: Tensor
    """The label's logit; 0 if it is not among these words."""


class CrossEntropyKernel(NamedTuple):
    """The two passes over rows of logits [k, v]; labels [k] outside of 0 to v - 1 are other ranks'."""

    statistics: Callable[[Tensor, Tensor], RowStatistics]
    gradient: Callable[..., Tensor]
    """row_gradient."""


def row_statistics(logits: Tensor, labels: Tensor) -> RowStatistics:
    """Return the statistics from which ranks compute the loss of rows with labels [k]."""
    values = logits.float()
    largest, word = values.max(dim=-1)
    largest = largest.clamp(min=LOWEST)
    total = (values - largest[:, None]).exp().sum(dim=-1)
    inside = (labels >= 0) & (labels < values.shape[-1])
    of_label = values.gather(1, labels.where(inside, 0)[:, None]).squeeze(1)
    return RowStatistics(largest, word, total, of_label.where(inside, 0.0))


def row_gradient(logits: Tensor, labels: Tensor, log_total: Tensor, factor: Tensor | None = None) -> Tensor:
    """Return softmax, times any factor [k], minus one-hot, [k, v] in the logits' type.

    `log_total` [k] is the logarithm of the sum of exponentials over all words; infinity makes the gradient of a row 0.
    """
    probabilities = (logits.float() - log_total[:, None]).exp()
    if factor is not None:
        probabilities = probabilities * factor[:, None]
    is_label = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]
    return torch.where(is_label, probabilities - 1.0, probabilities).to(logits.dtype)


CHUNKED = CrossEntropyKernel(row_statistics, row_gradient)
COMPILED = CrossEntropyKernel(compile_later(row_statistics), compile_later(row_gradient))

IMPLEMENTATIONS = (
    Implementation("chunked", lambda need: CHUNKED, suits=lambda need: need.device_type != "cpu"),
    # Two or three passes over 16-bit logits instead of about twelve over fp32 ones; it has not run on a GPU.
    compiled_row(lambda need: COMPILED, suits=lambda need: False),
    Implementation("full", lambda need: None),
)
