"""Tensors that a layer carries between steps (truncated backpropagation over lanes of text).

A layer names them in LayerDescription.carries. It reads the tensor that it wrote for the same rows in the previous
step, detached, or None in the first step. The key is the number of the micro-batch in the global batch, so a resume on
another number of data-parallel ranks finds them. Every tensor-parallel rank holds them completely. They are inputs of
the layer, so a recomputed layer reads the same ones. An evaluation begins without tensors and carries its own, so that
it changes nothing of the training.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class CarriedStates:
    """The carried tensors of one rank's layers."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = tuple(sorted(names))
        self._number = 0
        self._held: dict[tuple[str, int], Tensor] = {}
        self._written: dict[tuple[str, int], Tensor] = {}
        self._evaluated: dict[tuple[str, int], Tensor] | None = None

    @property
    def is_evaluating(self) -> bool:
        """True from begin_evaluation to end_evaluation."""
        return self._evaluated is not None

    def begin_evaluation(self) -> None:
        """Carry other tensors, none at first, until end_evaluation."""
        self._evaluated = {}

    def end_evaluation(self) -> None:
        """Discard the evaluation's tensors and return to those of the training."""
        self._evaluated = None

    def begin(self, micro_batch: int) -> None:
        """Select the micro-batch of the next forward pass by its number in the global batch."""
        self._number = micro_batch

    def take(self, name: str) -> Tensor | None:
        """Return the tensor of the selected micro-batch; None if no step has written it."""
        held = self._held if self._evaluated is None else self._evaluated
        return held.get((name, self._number))

    def put(self, name: str, value: Tensor) -> None:
        """Keep a tensor for the next step."""
        written = self._written if self._evaluated is None else self._evaluated
        written[name, self._number] = value.detach()

    def end_step(self, keep: bool) -> None:
        """Keep the step's tensors for the next step, or discard them."""
        if keep:
            self._held.update(self._written)
        self._written = {}

    def named(self) -> dict[str, Tensor]:
        """Return every tensor under `NAME.NUMBER`, for a checkpoint."""
        return {f"{name}.{number}": value for (name, number), value in self._held.items()}

    def load(self, named: dict[str, Tensor]) -> None:
        """Replace all tensors by those of a checkpoint."""
        self._held, self._written = {}, {}
        for key, value in named.items():
            name, _, number = key.rpartition(".")
            self._held[name, int(number)] = value
