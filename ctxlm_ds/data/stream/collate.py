"""From examples to micro-batches of constant shape, with the fields that an objective declares.

A loader worker sends the rows of a micro-batch to the training process as one flat int32 array (one pickle, no shared
memory): the int64 fields, then the float32 ones (their bits), each [rows, columns] after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.fields import FITS, IGNORE_LABEL, Field
from ctxlm_ds.data.sample import Batch, needed_places
from ctxlm_ds.errors import DataError

if TYPE_CHECKING:
    import torch

    from ctxlm_ds.objectives.base import LossTerm, Objective

FLOAT = "float32"


def collate_arrays(
    objective: Objective, fields: Sequence[Field], examples: Any, row_starts: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return rows as one flat array; `row_starts` [b + 1] is the first of the examples of each row.

    Raises DataError if a row has more tokens, sequences or predictions than its fields have places.
    """
    flat = np.empty((len(row_starts) - 1) * _row_size(fields), dtype=np.int32)
    arrays = split_fields(flat, fields)
    for field in fields:
        arrays[field.name][:] = field.fill
    row = objective.fill(examples, row_starts, arrays)
    if row != FITS:
        sizes = ", ".join(f"{field.name} {field.columns}" for field in fields)
        raise DataError(
            f"row {row} of a micro-batch does not fit into its fields ({sizes}); the sample index is damaged: delete "
            "its folder and build it again (ctxlm samples)"
        )
    return flat


def split_fields(flat: NDArray[np.int32], fields: Sequence[Field]) -> dict[str, NDArray[Any]]:
    """Return views [b, columns] of a flat array by field."""
    arrays: dict[str, NDArray[Any]] = {}
    offset, num_rows = 0, len(flat) // _row_size(fields)
    for field in sorted(fields, key=lambda field: field.dtype == FLOAT):
        view = flat[offset : offset + num_rows * field.columns].reshape(num_rows, field.columns)
        arrays[field.name] = view.view(np.float32) if field.dtype == FLOAT else view
        offset += view.size
    return arrays


def count_labels(term: LossTerm, arrays: Mapping[str, NDArray[Any]]) -> int:
    """Return the divisor of a term's sum over these rows: its count, or its labels that are not ignored."""
    if term.count is not None:
        return int(term.count(arrays))
    return int(np.count_nonzero(arrays[term.labels[0]] != IGNORE_LABEL))


def to_batches(
    flat: NDArray[np.int32], fields: Sequence[Field], micro_batch_size: int, device: torch.device | None = None
) -> list[Batch]:
    """Return the rows of a flat array as micro-batches, whose contiguous tensors share one buffer per dtype.

    They are on the CPU, or on a GPU `device`: they travel as int32 from page-locked memory, in one copy that runs while
    the GPU computes, and are widened there.
    """
    import torch

    packed, num_rows = torch.from_numpy(flat), len(flat) // _row_size(fields)
    if device is None or device.type != "cuda":
        buffers = _buffers(packed, fields)
    else:
        kernels, copies = torch.cuda.current_stream(device), _copy_stream(device)
        with torch.cuda.stream(copies):
            buffers = _buffers(_send(packed, device), fields)
        kernels.wait_stream(copies)
        for buffer in buffers:
            buffer.record_stream(kernels)
    tensors: dict[str, tuple[torch.Tensor, ...]] = {}
    for buffer, is_float in zip(buffers, (False, True), strict=True):
        group = [field for field in fields if (field.dtype == FLOAT) == is_float]
        for field, piece in zip(group, buffer.split([num_rows * field.columns for field in group]), strict=True):
            tensors[field.name] = piece.view(num_rows, field.columns).split(micro_batch_size)
    arrays = split_fields(flat, fields)
    places = [
        needed_places({name: array[first : first + micro_batch_size] for name, array in arrays.items()})
        for first in range(0, num_rows, micro_batch_size)
    ]
    pieces = zip(*tensors.values(), strict=True)
    return [Batch(dict(zip(tensors, own, strict=True)), needed) for own, needed in zip(pieces, places, strict=True)]


def _send(packed: torch.Tensor, device: torch.device) -> torch.Tensor:
    return packed.pin_memory().to(device, non_blocking=True)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    import torch

    return torch.cuda.Stream(device)


def _buffers(packed: torch.Tensor, fields: Sequence[Field]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the int64 and the float32 fields of a flat array; the second are a view of it."""
    import torch

    integers = sum(field.columns for field in fields if field.dtype != FLOAT)
    end = len(packed) // _row_size(fields) * integers
    return packed[:end].long(), packed[end:].view(torch.float32)


def _row_size(fields: Sequence[Field]) -> int:
    return sum(field.columns for field in fields)
