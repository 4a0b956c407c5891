"""Layers that learn from a teacher: the teacher's frozen layers in the same list, and copies of tensors for loss terms.

A teacher's layers are split and partitioned like all others. Checkpoints do not contain its parameters. Its outputs
have its prefix: `teacher.logits`.

Taps are tensors that a family writes on its way, by name: `hidden_states.N` after N of its repeated layers (0 before
the first, -1 after all of them and the last LayerNorm, as transformers' output_hidden_states), and `attention_scores.N`
of repeated layer N (from 0, or negative from the end): the products [b, n, s, s] of queries and keys over sqrt(d),
before mask and softmax, for the heads of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.models.layers import LayerDescription

HIDDEN_STATES, ATTENTION_SCORES = "hidden_states.", "attention_scores."
TEACHER = "teacher."
"""Before the names of a teacher's layers and tensors."""


def is_tap(name: str) -> bool:
    """Return whether a tensor is a tap, which every transformer can write, and not a head's output."""
    return name.startswith((HIDDEN_STATES, ATTENTION_SCORES))


def teacher_layers(
    descriptions: Sequence[LayerDescription], dtype: torch.dtype | None = None
) -> list[LayerDescription]:
    """Freeze the layers and put `teacher.` before their names and every tensor that they write.

    Fields of the batch keep their names: both models read the same ones. `dtype` is the teacher's data type if it is
    not that of the run.
    """
    written: set[str] = set()
    layers = []
    for description in descriptions:
        reads = tuple(TEACHER + name if name in written else name for name in description.reads)
        written.update(description.writes)
        frozen = replace(
            description,
            name=TEACHER + description.name,
            reads=reads,
            writes=tuple(TEACHER + name for name in description.writes),
            tie_key=description.tie_key and TEACHER + description.tie_key,
            recompute=False,
            frozen=True,
            dtype=dtype,
        )
        layers.append(frozen)
    return layers


def needed_layers(descriptions: Sequence[LayerDescription], outputs: Sequence[str]) -> list[LayerDescription]:
    """Leave out the layers that none of the outputs depends on."""
    wanted, kept = set(outputs), []
    for description in reversed(descriptions):
        if wanted.intersection(description.gives()):
            wanted.difference_update(description.gives())
            wanted.update(description.needs())
            kept.append(description)
    return kept[::-1]


def together(
    student: Sequence[LayerDescription], teacher: Sequence[LayerDescription], last: bool
) -> list[LayerDescription]:
    """Join the layers of both models in one list, which pipelines cut before the student's repeated layers only.

    `last` puts the teacher after the student, and so on the last stage. Otherwise the teacher's repeated layers are
    spread evenly over the student's: each stage holds a share of both.
    """
    teacher = [replace(description, block=False) for description in teacher]
    if last:
        return [*student, *teacher]
    blocks = [index for index, description in enumerate(student) if description.block]
    size = len(teacher)
    joined = list(student[: blocks[0]]) if blocks else []
    for number, start in enumerate(blocks):
        stop = blocks[number + 1] if number + 1 < len(blocks) else len(student)
        is_last = number + 1 == len(blocks)
        # The student's heads come last.
        end = start + 1 if is_last else stop
        joined += student[start:end]
        joined += teacher[number * size // len(blocks) : (number + 1) * size // len(blocks)]
        joined += student[end:stop]
    return joined


def with_taps(descriptions: Sequence[LayerDescription], names: Sequence[str]) -> list[LayerDescription]:
    """Add layers that write taps to a model whose repeated layers rewrite `hidden`; ConfigError if it has too few."""
    layers = list(descriptions)
    blocks = [index for index, description in enumerate(layers) if description.block]
    after: dict[int, list[str]] = {}
    for name in names:
        kind, _, number = name.rpartition(".")
        if f"{kind}." == ATTENTION_SCORES:
            place = _place(name, int(number), range(len(blocks)))
            block = layers[blocks[place]]
            arguments = {**block.call_kwargs, "with_scores": True}
            layers[blocks[place]] = replace(block, writes=(*block.writes, name), call_kwargs=arguments)
        else:
            place = _place(name, int(number), range(len(blocks) + 1))
            writers = [index for index, description in enumerate(layers) if "hidden" in description.writes]
            index = writers[-1] if place == len(blocks) else blocks[place] - 1
            after.setdefault(index, []).append(name)
    joined = []
    for index, description in enumerate(layers):
        joined += [description, *(tap("hidden", name) for name in after.get(index, []))]
    return joined


def _place(name: str, number: int, places: range) -> int:
    """Return a number from 0 for one that may count from the end."""
    if not -len(places) <= number < len(places):
        raise ConfigError(f"the objective needs {name} of a model that has {places[0]} to {places[-1]} of them")
    return places[number]


def tap(name: str, into: str) -> LayerDescription:
    """Describe the layer that keeps the current value of `name` as `into`, before later layers overwrite `name`."""
    return LayerDescription(f"tap_{into}", nn.Identity, (name,), (into,))
