"""Learnt biases of attention scores by the distance of key and query (Raffel 2020, section 2.1).

Shape letters: b rows, s positions, n heads of this rank, k buckets of distances.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.spec import ModelBuild
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.parameters import Init, ParameterFacts, declare
from ctxlm_ds.parallel.placement import COLUMNS


def relative_bias(
    name: str, ids: str, num_heads: int, init: Init, build: ModelBuild, buckets: int, reach: int, causal: bool
) -> LayerDescription:
    """Describe the layer before each block of a stack that writes `name` [n, s, s]; the stack's blocks share it.

    Args:
        name: of the layer and of the tensor that it writes.
        ids: a field [b, s] of the stack's rows, for their length.
        num_heads: of all ranks.
        init: initial values.
        build: this rank's share.
        buckets: k.
        reach: distance from which all share a bucket.
        causal: no key is after its query, so all buckets are of distances before it.
    """
    kwargs = {
        "num_heads": num_heads, "init": init, "parallel": build.parallel, "buckets": buckets, "reach": reach,
        "causal": causal,
    }  # fmt: skip
    return LayerDescription(name, RelativeBias, (ids,), (name,), kwargs, tie_key=name, once=True)


class RelativeBias(nn.Module):
    """A learnt number for each bucket of distances and each head; each rank holds those of its heads."""

    def __init__(
        self, num_heads: int, init: Init, parallel: ParallelContext, buckets: int, reach: int, causal: bool
    ) -> None:
        """Allocate the numbers; the arguments are those of relative_bias."""
        super().__init__()
        self.buckets, self.reach, self.causal = buckets, reach, causal
        self.weight = nn.Parameter(torch.empty(buckets, num_heads // parallel.size))
        declare(self, weight=ParameterFacts(init, decays=False, split=COLUMNS))
        if parallel.size > 1:
            from ctxlm_ds.parallel.megatron import mark_split

            mark_split(self.weight, dim=1)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the bias [n, s, s] for rows of ids [b, s]."""
        places = torch.arange(ids.shape[1], device=ids.device)
        numbers = distance_buckets(places - places[:, None], self.buckets, self.reach, self.causal)
        return F.embedding(numbers, self.weight).permute(2, 0, 1).contiguous()


def distance_buckets(distances: Tensor, buckets: int, reach: int, causal: bool) -> Tensor:
    """Map distances, place of the key minus that of the query, to buckets from 0.

    Half of the buckets are of keys after the query unless `causal`. Half of those of one direction are of one distance
    each, the others grow by a constant factor up to `reach` (mesh_tensorflow transformer_layers.py,
    `_relative_position_bucket`).
    """
    if causal:
        first, away = torch.zeros_like(distances), (-distances).clamp_min(0)
    else:
        buckets //= 2
        first, away = (distances > 0).long() * buckets, distances.abs()
    exact = buckets // 2
    # fp32 as the original: a distance at the border of two buckets depends on the rounding.
    grown = torch.log(away.float() / exact) / math.log(reach / exact) * (buckets - exact)
    far = (exact + grown.clamp_min(0.0).long()).clamp_max(buckets - 1)
    return first + torch.where(away < exact, away, far)
