"""Gradient norm and clipping where DeepSpeed keeps plain gradients (ZeRO stage 0), exact in every layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.training.fragments import Holding

CLIP_EPS = 1e-6
"""As DeepSpeed's and torch's clipping."""


def clip_gradients(
    parameters: Sequence[tuple[torch.nn.Parameter, Holding]], max_norm: float, topology: Topology
) -> float:
    """The L2 norm of the whole model's averaged gradients before clipping; gradients are scaled down to `max_norm`.

    What several ranks of a model hold (tensor-parallel copies, tied weights) counts once. `max_norm` 0 only measures.
    """
    gradients = [parameter.grad for parameter, _ in parameters if parameter.grad is not None]
    if topology.tensor_parallel_size * topology.pipeline_parallel_size == 1:
        norm = float(torch.nn.utils.get_total_norm(gradients))
    else:
        norm = math.sqrt(_global_square(parameters, topology))
    if 0.0 < max_norm < norm:
        torch._foreach_mul_(gradients, max_norm / (norm + CLIP_EPS))
    return norm


def _global_square(parameters: Sequence[tuple[torch.nn.Parameter, Holding]], topology: Topology) -> float:
    own = [
        parameter.grad
        for parameter, holding in parameters
        if parameter.grad is not None and not (holding.tensor_duplicate or holding.stage_duplicate)
    ]
    square = torch.zeros((), dtype=torch.float64)
    # Averaged over the data-parallel ranks already, so the first of them speaks for all.
    if own and topology.data_parallel_rank == 0:
        square = torch.nn.utils.get_total_norm(own).double().square().cpu()
    return float(topology.all_reduce_sum(square))
