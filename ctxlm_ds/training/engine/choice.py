"""Choices of tokens by a model's logits, in the place of the losses of a pass (losses.py).

Shape letters: b rows, s positions, p prediction slots, v vocabulary, n tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ctxlm_ds.kernels.sampling import in_pieces
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.cross_entropy import first_largest, first_over_ranks


class TokenChoice:
    """Chooses the next token of each row; it has the place of the losses in a pass (training/engine/losses.py)."""

    label_fields: tuple[str, ...] = ()

    def __init__(self, output: str, temperature: float, parallel: ParallelContext) -> None:
        """Choose from the logits that the model calls `output`; a temperature of 0 takes the largest."""
        self.outputs: tuple[str, ...] = (output,)
        self.places: list[int] = []
        """Position of the last token of each row of the next pass."""
        self.keys: list[int] = []
        """Key of each row's draws."""
        self.chosen: list[int] = []
        """Tokens of the last pass; empty on other pipeline stages than the last."""
        self._output = output
        self._temperature = temperature
        self._parallel = parallel

    def __call__(
        self, outputs: Mapping[str, Tensor], labels: Mapping[str, Tensor], factors: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Choose from logits [b, s, v / n], or [b·s, v / n] under sequence parallelism; no loss and no sums."""
        logits, places = outputs[self._output], torch.tensor(self.places, device=factors.device)
        rows = logits.flatten(0, -2).unflatten(0, (len(places), -1))
        last = rows[torch.arange(len(places), device=places.device), places].float()
        if self._temperature:
            keys, words = torch.tensor(self.keys, device=places.device), last.shape[-1]
            largest, word = in_pieces(last / self._temperature, places, keys, self._parallel.rank * words)
            self.chosen = first_over_ranks(largest, word, words, self._parallel).tolist()
        else:
            self.chosen = first_largest(last, self._parallel).tolist()
        return factors.new_zeros(()), {}


class MaskChoice(TokenChoice):
    """Chooses the most probable word of some prediction slots; `places` counts the slots of all rows."""

    def __call__(
        self, outputs: Mapping[str, Tensor], labels: Mapping[str, Tensor], factors: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Choose from logits [b, p, v / n] of p slots a row; no loss and no sums."""
        slots = outputs[self._output].flatten(0, -2)[torch.tensor(self.places, device=factors.device)]
        self.chosen = first_largest(slots.float(), self._parallel).tolist()
        return factors.new_zeros(()), {}
