"""Operations, messages and memory of Muon's matrices, counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ctxlm_ds.parallel.parameters import ZEROS, ParameterFacts
from ctxlm_ds.parallel.placement import Split
from ctxlm_ds.training.optimizers.matrices import (
    FLOAT,
    Matrices,
    blocks_of,
    orthogonalization_flops,
    sent_bytes,
    update_bytes,
)
from ctxlm_ds.training.optimizers.muon import orthogonalize

PLAIN = ParameterFacts(ZEROS, decays=True, matrix=True)
QKV = ParameterFacts(ZEROS, decays=True, split=Split("rows", (4, 2, 2)), matrix=True)


@pytest.mark.parametrize(("facts", "shape"), [(PLAIN, (8, 8)), (PLAIN, (12, 5)), (PLAIN, (5, 12)), (QKV, (8, 6))])
def test_operations_are_those_that_torch_counts(facts: ParameterFacts, shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        for block in blocks_of(facts, shape[0]):
            orthogonalize(torch.ones(1, block, shape[1]))
    assert counter.get_total_flops() == orthogonalization_flops(facts, shape)


MATRICES = Matrices(elements=800, largest=40, flops=1.0)


@pytest.mark.parametrize(
    ("stage", "data", "tensor", "elements"),
    [
        (0, 1, 1, 0), (3, 1, 1, 0),
        (0, 4, 1, 600),  # the results of a quarter go to three ranks
        (0, 1, 2, 800),  # half of each other's shards, and back
        (1, 4, 1, 20), (2, 4, 2, 220), (3, 4, 1, 300), (3, 4, 2, 350),
    ],
)  # fmt: skip
def test_what_a_rank_sends(stage: int, data: int, tensor: int, elements: int) -> None:
    assert sent_bytes(MATRICES, stage, data, tensor) == FLOAT * elements


def test_memory_of_the_update() -> None:
    assert update_bytes(MATRICES, 1, 1, 1) == FLOAT * (800 + 4 * 40)
    assert update_bytes(MATRICES, 3, 4, 1) == FLOAT * (200 + 600 + 4 * 40)
    assert update_bytes(Matrices(), 3, 4, 1) == sent_bytes(Matrices(), 3, 4, 1) == 0
