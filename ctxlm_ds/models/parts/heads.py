"""Prediction heads: masked tokens, a classifier over each sequence's first position, span boundaries.

Shape letters: b rows, s positions, p prediction slots, m sequences of a row, h width,
e width of the word table. With context parallelism, slots and sequences [b, p] are a rank's share [ceil(b p / c)].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ctxlm_ds.data.fields import MOST_BOUNDARY_TARGETS
from ctxlm_ds.models.layers import ModelBuild
from ctxlm_ds.models.parts.embeddings import SharedEmbedding
from ctxlm_ds.models.parts.norms import LayerNorm
from ctxlm_ds.models.parts.transformer import initial_weights
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.layers import ReplicatedLinear
from ctxlm_ds.parallel.mappings import gather_tokens, own_slots, select_slots
from ctxlm_ds.parallel.parameters import Init

if TYPE_CHECKING:
    from ctxlm_ds.families.base import TransformerSection

BOUNDARY_POSITION_WIDTH = 200
"""Width of the positions in a span (SpanBERT's --pair-positional-embedding-size)."""


def select_positions(hidden: Tensor, positions: Tensor, parallel: ParallelContext) -> Tensor:
    """Return the vectors [b, k, h] at positions [b, k] of each row of hidden [b, s, h].

    With context parallelism return this rank's share of them (select_slots).
    """
    if parallel.context_size > 1:
        return select_slots(hidden, positions, parallel)
    num_rows, seq_length = hidden.shape[:2]
    row_starts = torch.arange(num_rows, device=positions.device)[:, None] * seq_length
    flat = (positions + row_starts).flatten()
    return hidden.flatten(0, 1).index_select(0, flat).unflatten(0, positions.shape)


def head_arguments(model: TransformerSection, build: ModelBuild, **others: Any) -> dict[str, Any]:
    """Return the arguments of EncoderHeads and SpanBoundaryHead that a recipe gives, and `others`."""
    shape = {"width": model.hidden_size, "eps": model.layer_norm_eps, "activation": model.hidden_activation}
    return {**shape, "init": initial_weights(model), "build": build, **others}


class EncoderHeads(nn.Module):
    """The layers between an encoder and its tied decoder, on the predicted positions only.

    They are small, so every tensor-parallel rank computes all of them and has their complete gradients.
    """

    def __init__(
        self,
        width: int,
        eps: float,
        activation: str,
        init: Init,
        build: ModelBuild,
        num_classes: int = 0,
        predicted_width: int | None = None,
        bias: bool = True,
    ) -> None:
        """Make the layers, the LayerNorm with this epsilon.

        `num_classes` are those of BERT's pooler and classifier over each sequence's first position, 0 for neither;
        `predicted_width` is e, None for h. Without `bias` the transform and the LayerNorm have none.
        """
        super().__init__()
        predicted_width = predicted_width or width
        kernels, self.parallel = build.kernels, build.parallel
        self.mlm_transform = ReplicatedLinear(width, predicted_width, init, kernels, activation, bias=bias)
        self.mlm_layer_norm = LayerNorm(predicted_width, eps, kernels, bias=bias)
        self.pooler = ReplicatedLinear(width, width, init, kernels, optional=True) if num_classes else None
        self.nsp_classifier = (
            ReplicatedLinear(width, num_classes, init, kernels, optional=True) if num_classes else None
        )

    def forward(
        self, hidden: Tensor, sequence_ids: Tensor, prediction_positions: Tensor, cls_positions: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the predicted tokens' vectors [b, p, e] and, with classes, the sequences' logits [b, m, classes].

        sequence_ids [b, s] have the shape of a row; prediction_positions are [b, p], cls_positions [b, m].
        """
        if self.parallel.splits_tokens:
            hidden = gather_tokens(hidden, self.parallel).unflatten(0, self.parallel.own_shape(sequence_ids))
        predicted = select_positions(hidden, prediction_positions, self.parallel)
        predicted = self.mlm_layer_norm(self.mlm_transform(predicted))
        if self.pooler is None or self.nsp_classifier is None or cls_positions is None:
            return predicted
        pooled = torch.tanh(self.pooler(select_positions(hidden, cls_positions, self.parallel)))
        return predicted, self.nsp_classifier(pooled)


class SequenceClassifier(nn.Module):
    """BERT's pooler and a classifier over each sequence's first position, without dropout.

    The layers are those of BertForSequenceClassification. Every tensor-parallel rank computes all of them.
    """

    def __init__(self, width: int, num_classes: int, init: Init, build: ModelBuild) -> None:
        super().__init__()
        self.parallel = build.parallel
        self.pooler = ReplicatedLinear(width, width, init, build.kernels, optional=True)
        self.classifier = ReplicatedLinear(width, num_classes, init, build.kernels, optional=True)

    def forward(self, hidden: Tensor, sequence_ids: Tensor, cls_positions: Tensor) -> Tensor:
        """Map hidden, sequence_ids [b, s] and cls_positions [b, m] to logits [b, m, classes]."""
        if self.parallel.splits_tokens:
            hidden = gather_tokens(hidden, self.parallel).unflatten(0, self.parallel.own_shape(sequence_ids))
        return self.classifier(torch.tanh(self.pooler(select_positions(hidden, cls_positions, self.parallel))))


class SpanBoundaryHead(nn.Module):
    """The layers of SpanBERT between an encoder and the tied decoder that predict a span from its boundaries.

    Two linear layers, each with activation and LayerNorm, over the vectors of the tokens before and after the span and
    a learnt position in it (Joshi 2020, section 3.2; facebookresearch/SpanBERT fairseq/models/pair_bert.py). Every
    tensor-parallel rank computes all of it.
    """

    def __init__(
        self, width: int, eps: float, activation: str, init: Init, build: ModelBuild, predicted_width: int
    ) -> None:
        """Make the layers; the arguments are those of EncoderHeads."""
        super().__init__()
        kernels, self.parallel = build.kernels, build.parallel
        # Looks up slots, which sequence parallelism does not split.
        self.position_embeddings = SharedEmbedding(
            MOST_BOUNDARY_TARGETS, BOUNDARY_POSITION_WIDTH, init, ParallelContext(), optional=True
        )
        inputs = 2 * width + BOUNDARY_POSITION_WIDTH
        self.first = ReplicatedLinear(inputs, width, init, kernels, activation, optional=True)
        self.first_layer_norm = LayerNorm(width, eps, kernels, optional=True)
        self.second = ReplicatedLinear(width, predicted_width, init, kernels, activation, optional=True)
        self.second_layer_norm = LayerNorm(predicted_width, eps, kernels, optional=True)

    def forward(
        self, hidden: Tensor, sequence_ids: Tensor, boundary_positions: Tensor, boundary_offsets: Tensor
    ) -> Tensor:
        """Map hidden, sequence_ids [b, s], boundary_positions [b, 2 p] (first those before the spans, then those after)
        and boundary_offsets [b, p] to vectors [b, p, e].
        """
        if self.parallel.splits_tokens:
            hidden = gather_tokens(hidden, self.parallel).unflatten(0, self.parallel.own_shape(sequence_ids))
        left, right = (select_positions(hidden, ends, self.parallel) for ends in boundary_positions.chunk(2, dim=1))
        if self.parallel.context_size > 1:
            boundary_offsets = own_slots(boundary_offsets, self.parallel, fill=0)
        places = self.position_embeddings(boundary_offsets)
        inputs = torch.cat([left, right, places.to(left.dtype)], dim=-1)
        return self.second_layer_norm(self.second(self.first_layer_norm(self.first(inputs))))
