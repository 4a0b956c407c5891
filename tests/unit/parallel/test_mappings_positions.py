"""Tokens of a rank by their numbers in the complete micro-batch, and a rank's share of fields."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.kernels.norm import in_runs
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.mappings import own_share, token_runs

KERNELS = KernelSet({}, "cpu", torch.float32)
ROWS, LENGTH, WIDTH, CONTEXT = 3, 8, 6, 2


def context(rank: int, tensor_rank: int = 0, tensor: int = 1, **settings: bool) -> ParallelContext:
    return ParallelContext(tensor, tensor_rank, context_size=CONTEXT, context_rank=rank, rows=ROWS, **settings)


def whole_numbers() -> torch.Tensor:
    return torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)


@pytest.mark.parametrize("tensor", [1, 3])
def test_runs_name_the_tokens_of_the_complete_micro_batch(tensor: int) -> None:
    """Also where sequence parallelism cuts a rank's tokens in the middle of a row."""
    for rank in range(CONTEXT):
        own = whole_numbers().chunk(CONTEXT, dim=1)[rank].flatten()
        for tensor_rank in range(tensor):
            tokens = own.chunk(tensor)[tensor_rank]
            runs = token_runs(len(tokens), context(rank, tensor_rank, tensor), split_tokens=tensor > 1)
            assert [run.begin for run in runs] == [0, *(run.end for run in runs[:-1])]
            found = torch.cat([torch.arange(run.end - run.begin) + run.first for run in runs])
            assert torch.equal(found, tokens)


def test_runs_of_several_tensors_are_joined() -> None:
    x, y = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    runs = [(slice(0, 5), 2.0), (slice(5, 8), -1.0)]
    total, first = in_runs(lambda a, b, factor: (a + factor * b, a), runs, x, y)  # type: ignore[arg-type,operator]
    factors = torch.tensor([2.0] * 5 + [-1.0] * 3).view(2, 4, 1)
    assert torch.equal(total, x + factors * y) and torch.equal(first, x)


@pytest.mark.parametrize(
    ("shared", "wanted"), [("complete", [[1, 2], [3, 4], [5, 6]]), ("positions", [[2], [4], [6]]), ("slots", [4, 5, 6])]
)
def test_a_field_is_shared_as_it_declares(shared: str, wanted: object) -> None:
    assert own_share(torch.tensor([[1, 2], [3, 4], [5, 6]]), shared, context(1)).tolist() == wanted


def test_empty_slots_fill_the_last_share() -> None:
    found = [own_share(torch.tensor([[1], [2], [3]]), "slots", context(rank)).tolist() for rank in range(CONTEXT)]
    assert found == [[1, 2], [3, IGNORE_LABEL]]


def test_heads_are_numbered_by_both_ranks() -> None:
    shares = [context(rank, tensor_rank, 2).head_share for tensor_rank in range(2) for rank in range(CONTEXT)]
    assert shares == [0, 1, 2, 3]
    rows = SimpleNamespace(shape=(ROWS, LENGTH))
    assert context(0).own_shape(rows) == (ROWS, LENGTH // CONTEXT)  # type: ignore[arg-type]
