"""What ranks exchange under context parallelism is what one rank computes from complete rows, with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ctxlm_ds.models.parts.heads import select_positions
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.mappings import all_slots, own_positions, own_slots, to_heads, to_positions
from ctxlm_ds.parallel.topology import build_topology
from tests.dist.runner import run_ranks

pytestmark = pytest.mark.dist
ROWS, LENGTH, WIDTH, HEADS = 3, 8, 5, 8


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def context_of(size: int) -> ParallelContext:
    topology = build_topology(context_parallel_size=size)
    return ParallelContext(
        context_size=size, context_rank=topology.context_parallel_rank, context_group=topology.context_group
    )


def result_and_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """A sum with numbers that depend on the place, so that each place has another gradient."""
    x = x.detach().clone().requires_grad_()
    y = function(x)
    (gradient,) = torch.autograd.grad((y * y.detach().cos()).sum(), x)
    return y.detach(), gradient


def exchange(rank: int, world_size: int) -> list[str]:
    """Heads of complete rows are those of one rank; exchanged back, they are the positions that were sent."""
    parallel, wrong = context_of(world_size), []
    whole = [numbers(ROWS, LENGTH, heads, WIDTH, seed=heads) for heads in (HEADS, 4, 4)]
    heads = [x.chunk(world_size, dim=2)[rank] for x in whole]
    found = to_heads([own_positions(x, parallel) for x in whole], parallel)
    wrong += [f"heads {number}" for number in range(3) if not torch.equal(found[number], heads[number])]
    own = own_positions(whole[0], parallel)
    back, gradient = result_and_gradient(lambda x: to_positions(to_heads([x], parallel)[0].sin(), parallel), own)
    wanted, of_one = result_and_gradient(torch.sin, own)
    wrong += [] if torch.equal(back, wanted) and torch.equal(gradient, of_one) else ["positions"]
    return wrong


def slots(rank: int, world_size: int, positions: list[list[int]]) -> list[str]:
    """Each rank has its share of the slots, and its positions get the gradients of all."""
    parallel, wrong = context_of(world_size), []
    hidden, places = numbers(len(positions), LENGTH, WIDTH), torch.tensor(positions)
    own = own_positions(hidden, parallel)
    found, gradient = result_and_gradient(lambda x: select_positions(x, places, parallel), own)
    alone, of_all = result_and_gradient(lambda x: select_positions(x, places, ParallelContext()), hidden)
    number = -(-places.numel() // world_size)
    padded = torch.nn.functional.pad(alone.flatten(0, 1), (0, 0, 0, number * world_size - places.numel()))
    wrong += [] if torch.equal(found, padded.split(number)[rank]) else ["slots"]
    wrong += [] if torch.allclose(gradient, own_positions(of_all, parallel), rtol=1e-14, atol=0) else ["gradient"]
    gathered = all_slots(own_slots(places, parallel), places.shape, parallel)
    return wrong + ([] if torch.equal(gathered, places) else ["gathered"])


@pytest.mark.parametrize("size", [2, 4])
def test_positions_are_exchanged_for_heads(size: int) -> None:
    assert run_ranks(exchange, size) == [[]] * size


@pytest.mark.parametrize(
    "positions",
    [
        [[0, 3, 7], [1, 1, 6], [5, 4, 2]], [[0, 1], [1, 0], [1, 1]], [[7]],
    ],
    ids=["everywhere", "all on the first rank", "fewer than ranks"],
)  # fmt: skip
def test_slots_are_shared_by_all_ranks(positions: list[list[int]]) -> None:
    assert run_ranks(slots, 4, positions) == [[]] * 4


def groups(rank: int, world_size: int) -> Any:
    topology = build_topology(tensor_parallel_size=2, pipeline_parallel_size=2, context_parallel_size=2)
    members = torch.distributed.get_process_group_ranks(topology.context_group)
    places = topology.tensor_parallel_rank, topology.context_parallel_rank, topology.pipeline_parallel_rank
    speaks = topology.speaks_for_data, topology.speaks_for_losses
    return (*places, topology.replica_rank, topology.replica_size, members, speaks)


def test_ranks_of_a_row_come_after_those_of_a_layer() -> None:
    assert run_ranks(groups, 8) == [
        (0, 0, 0, 0, 2, [0, 2], (True, False)), (1, 0, 0, 0, 2, [1, 3], (False, False)),
        (0, 1, 0, 1, 2, [0, 2], (False, False)), (1, 1, 0, 1, 2, [1, 3], (False, False)),
        (0, 0, 1, 0, 2, [4, 6], (False, True)), (1, 0, 1, 0, 2, [5, 7], (False, False)),
        (0, 1, 1, 1, 2, [4, 6], (False, True)), (1, 1, 1, 1, 2, [5, 7], (False, False)),
    ]  # fmt: skip
