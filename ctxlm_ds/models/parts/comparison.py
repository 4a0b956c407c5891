"""Layers that compare a student's tensors with a teacher's as soon as both are known (TinyBERT, Jiao 2020, section 3).

Each adds the squared differences of every row to an error [b], which the next of them or the loss reads. So neither
hidden states nor attention scores [b, n, s, s] are kept, or cross a cut of a pipeline, until the loss.

Shape letters: b rows, s positions, h width of the student, w width of the teacher, n heads of this rank. Hidden states
are [b, s, h], or under sequence parallelism this rank's share of the flattened tokens [b·s / ranks, h].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.parts.distillation import ATTENTION_SCORES, TEACHER
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.cross_entropy import Sums
from ctxlm_ds.parallel.layers import ReplicatedLinear
from ctxlm_ds.parallel.mappings import gather_tokens, reduce_from_ranks
from ctxlm_ds.parallel.parameters import Init

if TYPE_CHECKING:
    from ctxlm_ds.models.layers import ModelBuild

PROJECTION, PROJECTED_STATES = "fit_dense", "projected_states"
LOWEST_SCORE = -1e2
"""Attention scores from here down count as 0, in both models (general_distill.py of TinyBERT)."""


class Comparison(NamedTuple):
    """Two taps that a layer compares (models/parts/distillation.py)."""

    student: str
    teacher: str
    """Without `teacher.` before."""
    into: str
    """Error to which the squared differences are added."""


def projection(width: int, teacher_width: int, init: Init, build: ModelBuild) -> LayerDescription:
    """Describe the layer that maps the student's last hidden states to the teacher's width, and compares all of them.

    It writes `projected_states`; in a run, with_comparisons replaces it by comparisons with the same weights.
    """
    kwargs = {
        "in_features": width, "out_features": teacher_width, "init": init, "kernels": build.kernels,
        "parallel": build.parallel,
    }  # fmt: skip
    return LayerDescription(PROJECTION, ProjectedStates, ("hidden",), (PROJECTED_STATES,), kwargs, PROJECTION)


def with_comparisons(
    layers: Sequence[LayerDescription], comparisons: Sequence[Comparison], build: ModelBuild
) -> list[LayerDescription]:
    """Insert each comparison after the layers that write its tensors, in the place of the student's `projection`.

    Args:
        layers: those of both models, with a projection if hidden states are compared.
        comparisons: what to compare.
        build: of the student.
    """
    if not comparisons:
        return list(layers)
    projections = [description for description in layers if PROJECTED_STATES in description.writes]
    layers = [description for description in layers if PROJECTED_STATES not in description.writes]
    written = {name: index for index, description in enumerate(layers) for name in description.writes}
    after: dict[int, list[Comparison]] = {}
    for comparison in comparisons:
        index = max(written[comparison.student], written[TEACHER + comparison.teacher])
        after.setdefault(index, []).append(comparison)
    started: set[str] = set()
    joined: list[LayerDescription] = []
    for index, description in enumerate(layers):
        joined.append(description)
        for student, teacher, into in after.get(index, []):
            earlier = (into,) if into in started else ()
            started.add(into)
            if student.startswith(ATTENTION_SCORES):
                layer = LayerDescription(
                    f"compare_{student}", AttentionComparison, (), (), {"parallel": build.parallel}
                )
            else:
                (layer,) = projections
            reads = (student, TEACHER + teacher, "sequence_ids", *earlier)
            joined.append(replace(layer, reads=reads, writes=(into,), recompute=build.recompute))
    return joined


class ProjectedStates(ReplicatedLinear):
    """Maps hidden states to the teacher's width and compares them with the teacher's (section 3.1).

    One matrix serves the embeddings and all layers, as in TinyBERT's code; the paper has one for each of the two.
    """

    def __init__(
        self, in_features: int, out_features: int, init: Init, kernels: KernelSet, parallel: ParallelContext
    ) -> None:
        super().__init__(in_features, out_features, init, kernels, parallel=parallel, optional=True)

    def forward(
        self,
        hidden: Tensor,
        theirs: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        error: Tensor | None = None,
    ) -> Tensor:
        """Return projected states, or with the teacher's [b, s, w] add to the error [b] of each row.

        The sum is that of mean squared differences, without padding (sequence_ids [b, s] of 0); no error is one of 0.
        """
        projected = super().forward(hidden)
        if theirs is None or sequence_ids is None:
            return projected
        squares = (projected.float() - theirs.float()).square().mean(-1)
        if self.parallel.splits_tokens:
            squares = gather_tokens(squares, self.parallel)
        total = squares.view_as(sequence_ids).where(sequence_ids > 0, 0.0).sum(-1)
        return total if error is None else error + total


class AttentionComparison(nn.Module):
    """Compares attention scores before the softmax (section 3.1); each rank adds up those of its heads."""

    def __init__(self, parallel: ParallelContext) -> None:
        super().__init__()
        self.ranks = parallel.size

    def forward(self, scores: Tensor, theirs: Tensor, sequence_ids: Tensor, error: Tensor | None = None) -> Tensor:
        """Add to the error [b] each row's sum, over the pairs of positions in a sequence, of mean squared differences.

        Both scores are [b, n, s, s]; the error is the part of this rank's heads, and none is one of 0.
        """
        seen = visible_pairs(sequence_ids)[:, None]
        ours, theirs = (x.where(seen & (x > LOWEST_SCORE), 0.0).float() for x in (scores, theirs))
        total = (ours - theirs).square().sum((1, 2, 3)) / (scores.shape[1] * self.ranks)
        return total if error is None else error + total


def visible_pairs(sequence_ids: Tensor) -> Tensor:
    """Return [b, s, s] bool, True if both positions belong to one sequence; sequence_ids [b, s] are 0 at padding."""
    return (sequence_ids[:, :, None] == sequence_ids[:, None, :]) & (sequence_ids > 0)[:, None, :]


def token_error_sums(outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext) -> Sums:
    """Sum an error [b] that every rank holds completely; the count is that of positions in sequence_ids [b, s]."""
    (error,), (sequence_ids,) = outputs, labels
    return Sums(error.sum(), None, (sequence_ids > 0).sum(dtype=torch.float32))


def pair_error_sums(outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext) -> Sums:
    """Sum an error [b] over the ranks that hold its parts; the count is that of pairs in sequence_ids [b, s]."""
    (error,), (sequence_ids,) = outputs, labels
    return Sums(reduce_from_ranks(error.sum(), parallel), None, visible_pairs(sequence_ids).sum(dtype=torch.float32))
