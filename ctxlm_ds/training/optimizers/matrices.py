"""What Muon's matrices add to a step: operations, messages and memory (muon.py, matrix_work.py).

Messages and memory are estimates: which ranks share a matrix depends on where ZeRO's partitions end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ctxlm_ds.parallel.parameters import ParameterFacts

ITERATIONS = 5
FLOAT = 4
WORKSPACE = 4
"""Copies of the largest matrix during the iterations: two values of it, its square, and the square's square."""


class Matrices(NamedTuple):
    """The matrices that one rank of a pipeline stage holds before ZeRO."""

    elements: int = 0
    """Of this tensor-parallel rank's shards."""
    largest: int = 0
    """Of the largest complete matrix."""
    flops: float = 0.0
    """Operations of all iterations on all complete matrices."""


def blocks_of(facts: ParameterFacts, rows: int) -> list[int]:
    """Return the rows of each matrix that a parameter consists of (query, key and value are separate)."""
    return list(facts.split.blocks if facts.split else ()) or [rows]


def orthogonalization_flops(facts: ParameterFacts, shape: Sequence[int]) -> float:
    """Return the operations of all iterations of Newton-Schulz on a parameter of the full `shape`."""
    rows, columns = shape
    pairs = (sorted((block, columns)) for block in blocks_of(facts, rows))
    return float(sum(2 * ITERATIONS * (2 * short * short * long + short**3) for short, long in pairs))


def sent_bytes(matrices: Matrices, zero_stage: int, data: int, tensor: int) -> int:
    """Return the bytes of momentum and results that a rank sends in a step.

    Stage 0 gathers shards over tensor-parallel ranks and returns the results to all. Stages 1 and 2 cut a flat
    partition at ranks, so with full shards only a matrix at a cut is sent, a quarter of it on average and back.
    """
    ranks = data * tensor
    if ranks == 1 or not matrices.elements:
        return 0
    if zero_stage == 0:
        gathered = matrices.elements * (tensor - 1) // ranks
        return FLOAT * (gathered + matrices.elements * (ranks - 1) // ranks)
    share = matrices.elements // data
    if zero_stage == 3:
        return FLOAT * 2 * share * (ranks - 1) // ranks
    at_cut = matrices.largest // 2 if data > 1 else 0
    return FLOAT * (2 * share * (tensor - 1) // tensor + at_cut)


def update_bytes(matrices: Matrices, zero_stage: int, data: int, tensor: int) -> int:
    """Return the memory of the update: the momentum one step ahead, what is sent and received, and the iterations."""
    share = matrices.elements // (data if zero_stage else 1)
    held = share + 2 * sent_bytes(matrices, zero_stage, data, tensor) // FLOAT
    return FLOAT * (held + WORKSPACE * matrices.largest) if matrices.elements else 0
