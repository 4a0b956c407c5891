"""A model beside the model: the layers of a family, none of them trained, in front of those that learn from them.

Its layers stand in the same list, so they are split, partitioned and cut into stages as all others; their parameters
are no part of checkpoints (Family.frozen gives their values). Its outputs have the prefix: `teacher.logits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ctxlm_ds.models.layers import LayerDescription


def teacher_layers(descriptions: Sequence[LayerDescription], prefix: str = "teacher") -> list[LayerDescription]:
    """Freeze the layers and put `prefix.` before their names and every tensor that they write.

    Fields of the batch keep their names: both models read the same.
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
