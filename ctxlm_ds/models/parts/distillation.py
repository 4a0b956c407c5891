"""Layers that learn from a teacher: the teacher's frozen layers in the same list, and copies of tensors for loss terms.

A teacher's layers are split, partitioned and cut into stages like all others. Checkpoints do not contain its
parameters; Family.frozen gives their values. Its outputs have its prefix: `teacher.logits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from ctxlm_ds.models.layers import LayerDescription


def teacher_layers(descriptions: Sequence[LayerDescription], prefix: str = "teacher") -> list[LayerDescription]:
    """Freeze the layers and put `prefix.` before their names and every tensor that they write.

    Fields of the batch keep their names: both models read the same ones.
    """
    written: set[str] = set()
    layers = []
    for description in descriptions:
        reads = tuple(f"{prefix}.{name}" if name in written else name for name in description.reads)
        written.update(description.writes)
        layers.append(
            replace(
                description,
                name=f"{prefix}.{description.name}",
                reads=reads,
                writes=tuple(f"{prefix}.{name}" for name in description.writes),
                tie_key=description.tie_key and f"{prefix}.{description.tie_key}",
                recompute=False,
                frozen=True,
            )
        )
    return layers


def tap(name: str, into: str) -> LayerDescription:
    """Describe the layer that keeps the current value of `name` as `into`, before later layers overwrite `name`.

    transformer_blocks(scores=...) writes attention scores.
    """
    return LayerDescription(f"tap_{into}", Tap, (name,), (into,))


class Tap(nn.Module):
    """Returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x
