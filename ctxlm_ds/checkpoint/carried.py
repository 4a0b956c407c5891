"""What layers carry from step to step, in checkpoints: saved by micro-batch, found again by any number of ranks.

In: an engine. Out: one fp32 tensor for each carried name and micro-batch (models/carried.py). Not here: the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ctxlm_ds.checkpoint.layout_free import CheckpointReader
from ctxlm_ds.checkpoint.pieces import CARRIED_KIND
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.training.engine import Engine


def carried_tensors(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what this rank must save by name: tensor-parallel ranks hold the same, of which the first speaks."""
    if engine.topology.tensor_parallel_rank == 0:
        yield from engine.carried_tensors().items()


def carried_elements(engine: Engine) -> int:
    """Count the elements of what this rank must save."""
    return sum(tensor.numel() for _, tensor in carried_tensors(engine))


def load_carried(engine: Engine, reader: CheckpointReader, environment: dict[str, Any]) -> None:
    """Give the engine what its micro-batches carried when the checkpoint was written.

    Args:
        engine: its layers carry something, or nothing.
        reader: of the checkpoint.
        environment: of the run that wrote it.

    Raises:
        CheckpointError: it was written with micro-batches of another size, whose rows carry other lanes.
    """
    saved = set(reader.carried_names())
    if not saved:
        engine.load_carried({})
        return
    before, now = environment["micro_batch_size"], engine.config.training.micro_batch_size
    if before != now:
        raise CheckpointError(
            f"{reader.path}: the model carries a state from step to step for each row of a micro-batch, and it was "
            f"saved for micro-batches of {before} rows; set training.micro_batch_size back from {now} to {before}, or "
            f"start a new run from its weights: --set initialize_from={reader.path} run_dir=NEW_FOLDER"
        )
    missing = [name for name in engine.carried_names() if name not in saved]
    if missing:
        raise CheckpointError(f"{reader.path}: carried state {missing[0]} is missing (it has {len(saved)})")
    engine.load_carried({name: reader.read_full(name, CARRIED_KIND) for name in engine.carried_names()})
