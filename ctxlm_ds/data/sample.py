"""The values handed from samples to the model: Sample -> (objective) -> Example -> (collate) -> Batch.

Shape letters: n tokens of one sequence, k its predictions; b rows of a micro-batch, s positions of a row,
p prediction slots of a row, m sequences of a row (1 without packing).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

IGNORE_LABEL = -100
NO_LABEL = -1


@dataclass(frozen=True, slots=True)
class Sample:
    """One input sequence before corruption, special tokens in place.

    For causal_lm the last token is no input: it is what the last input predicts, and may be another sample's first.
    """

    input_ids: NDArray[np.int64]
    """[n]"""
    token_type_ids: NDArray[np.int64]
    """[n], 0 for [CLS] A [SEP], 1 for B [SEP]."""
    special_mask: NDArray[np.bool_]
    """[n], True where a special token was inserted by the sample builder (CLS, SEP, separators)."""
    is_random_next: int
    """0 B follows A, 1 B is from another document, NO_LABEL where the format has no such label."""


@dataclass(frozen=True, slots=True)
class Example:
    """One input sequence after corruption."""

    input_ids: NDArray[np.int64]
    """[n]"""
    token_type_ids: NDArray[np.int64]
    """[n]"""
    prediction_positions: NDArray[np.int64]
    """[k], ascending."""
    prediction_labels: NDArray[np.int64]
    """[k], the original ids."""
    is_random_next: int


@dataclass(slots=True)
class Batch:
    """One micro-batch of constant shape; every tensor int64 unless said otherwise."""

    input_ids: torch.Tensor
    """[b, s], pad id where empty."""
    token_type_ids: torch.Tensor
    """[b, s]"""
    position_ids: torch.Tensor
    """[b, s], 0-based, restarting in each packed sequence; 0 at padding."""
    sequence_ids: torch.Tensor
    """[b, s], 1..m for the sequences of a row, 0 at padding."""
    sequence_starts: torch.Tensor
    """[b, m + 1], first position of each sequence and of the padding; s where there is none."""
    prediction_positions: torch.Tensor
    """[b, p], 0 in empty slots."""
    cls_positions: torch.Tensor
    """[b, m], first position of each sequence, 0 in empty slots."""
    labels: dict[str, torch.Tensor]
    """By loss term: masked_lm [b, p], causal_lm [b, s], next_sentence [b, m]; IGNORE_LABEL in empty slots."""

    def model_inputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the first layer takes, in its order."""
        return (
            self.input_ids,
            self.token_type_ids,
            self.position_ids,
            self.sequence_ids,
            self.sequence_starts,
            self.prediction_positions,
            self.cls_positions,
        )
