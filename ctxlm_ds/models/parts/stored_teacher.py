"""Layers that read what a teacher computed ahead, in the place of the teacher's layers (ctxlm teacher).

The vocabulary's products are not stored but their input: the hidden states at the predicted positions are some hundred
times smaller than logits. A run keeps the word table and computes the same products.

Shape letters: b rows, s positions, h width, n heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.parts.distillation import ATTENTION_SCORES, HIDDEN_STATES
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.layers import VocabParallelBias, VocabParallelEmbedding
from ctxlm_ds.parallel.mappings import own_tokens

TEACHER = "teacher."
STORED = "stored."
"""Begins the names of the batch's fields that hold a teacher's tensors."""


def split_at_products(
    layers: Sequence[LayerDescription], outputs: Sequence[str]
) -> tuple[tuple[str, ...], list[LayerDescription]]:
    """Return the tensors to store for the outputs, and the layers that compute the outputs from them.

    Args:
        layers: those of the teacher, under their own names.
        outputs: tensors that the losses need.
    """
    written = {name for description in layers for name in description.writes}
    wanted, products = list(outputs), []
    for description in reversed(layers):
        if set(wanted).intersection(description.gives()) and _is_product(description, written):
            wanted = [name for name in wanted if name not in description.gives()] + list(description.needs())
            products.append(description)
    return tuple(dict.fromkeys(wanted)), products[::-1]


def _is_product(description: LayerDescription, written: set[str]) -> bool:
    """Return whether a layer maps hidden states to the vocabulary, or adds to its scores."""
    factory = description.factory
    of_vocabulary = isinstance(factory, type) and issubclass(factory, (VocabParallelEmbedding, VocabParallelBias))
    return of_vocabulary and written.issuperset(description.needs())


def with_stored(
    layers: Sequence[LayerDescription],
    split: tuple[Sequence[str], Sequence[LayerDescription]],
    parallel: ParallelContext,
) -> list[LayerDescription]:
    """Replace a teacher's layers by layers that read its stored tensors from the fields `stored.NAME` of the batch.

    A tensor is read where the teacher would write it, so that gradients add up in the same order.

    Args:
        layers: those of both models.
        split: the stored tensors and the remaining layers, as split_at_products returns them.
        parallel: this rank's share of every layer.
    """
    stored, products = {TEACHER + name for name in split[0]}, {TEACHER + description.name for description in split[1]}
    writers = {name: index for index, description in enumerate(layers) for name in description.writes}
    kept = []
    for index, description in enumerate(layers):
        if not description.frozen or (description.name in products and _is_product(description, set(writers))):
            kept.append(description)
            continue
        for name in description.writes:
            if name in stored and writers[name] == index:
                plain = name.removeprefix(TEACHER)
                reading = LayerDescription(
                    f"read_{name}", StoredTensor, (STORED + plain,), (name,), {"name": plain, "parallel": parallel},
                    frozen=True, dtype=description.dtype,
                )  # fmt: skip
                kept.append(reading)
    return kept


class StoredTensor(nn.Module):
    """Returns this rank's share of a stored tensor, as the teacher's layers would."""

    def __init__(self, name: str, parallel: ParallelContext) -> None:
        super().__init__()
        self.parallel = parallel
        self.by_heads = name.startswith(ATTENTION_SCORES)
        self.by_tokens = name.startswith(HIDDEN_STATES) or name == "hidden"

    def forward(self, x: Tensor) -> Tensor:
        """Map a complete tensor to this rank's.

        Scores [b, n, s, s] become those of its heads, and under sequence parallelism hidden states [b, s, h] those of
        its tokens. Other tensors are complete on every rank.
        """
        if self.by_heads:
            return x.chunk(self.parallel.size, dim=1)[self.parallel.rank]
        if self.by_tokens and self.parallel.splits_tokens:
            return own_tokens(x.flatten(0, 1), self.parallel)
        return x
