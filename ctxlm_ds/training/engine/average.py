"""The moving average of the weights (training.ema): one more tensor for each that the inner optimizer steps.

It has the place of a moment, so it is partitioned, saved and loaded as one in every ZeRO stage and layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ctxlm_ds.console import logger
from ctxlm_ds.recipe.sections import EMA_KIND


class WeightAverage:
    """The average of fp32 weights after each applied update: decay * average + (1 - decay) * weights."""

    def __init__(
        self, decay: float | None, owners: Callable[[], Sequence[torch.Tensor]], weights_changed: Callable[[], None]
    ) -> None:
        """Take the tensors that the optimizer steps, and what updates the model after they were written.

        Without a decay nothing is kept.
        """
        self._decay, self._owners, self._weights_changed = decay, owners, weights_changed
        self._values: dict[int, torch.Tensor] = {}
        self.kinds: tuple[str, ...] = () if decay is None else (EMA_KIND,)

    @property
    def is_kept(self) -> bool:
        """Return whether there is an average; the same on every rank."""
        return bool(self._values)

    def of(self, owner: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the average of an owner tensor by its kind; empty before it has begun."""
        return {EMA_KIND: self._values[id(owner)]} if id(owner) in self._values else {}

    def begin(self, is_loaded: bool = False) -> None:
        """Begin with the present weights unless it has begun; `is_loaded`: values of a checkpoint will follow."""
        if self._decay is not None and not self._values:
            if not is_loaded:
                logger.info("training.ema: the average begins with the present weights")
            self._values = {id(owner): owner.detach().clone() for owner in self._owners()}

    def forget(self) -> None:
        self._values.clear()

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after an applied update."""
        if self._decay is not None:
            owners = self._owners()
            torch._foreach_lerp_([self._values[id(one)] for one in owners], owners, 1.0 - self._decay)

    @contextmanager
    def in_place_of_the_weights(self) -> Iterator[None]:
        """Compute with the averages inside; the weights come back bit for bit. All ranks call it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for owner in self._owners():
            average = self._values[id(owner)]
            kept = owner.clone()
            owner.copy_(average)
            average.copy_(kept)
        self._weights_changed()
