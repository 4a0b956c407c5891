"""Work on complete matrices by threads that stand for ranks: who does it, and what comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ctxlm_ds.parallel.placement import COLUMNS, ROWS, Shard, Split, shard_of
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.training.engine.fragments import Fragment, Holding
from ctxlm_ds.training.optimizers.base import FLOAT
from ctxlm_ds.training.optimizers.matrix_work import Held, Matrices, MatrixWork, sent_bytes, share_out, update_bytes
from ctxlm_ds.training.optimizers.steps import Sharers

SHAPES = {"up": (8, 4), "down": (4, 8), "qkv": (12, 4), "plain": (3, 5)}
SPLITS = {"up": ROWS, "down": COLUMNS, "qkv": Split("rows", (4, 4, 4)), "plain": None}
COSTS = {"up": 4.0, "down": 4.0, "qkv": 9.0, "plain": 2.0}


class Threads:
    """Sharers whose ranks are threads of this process."""

    def __init__(self, rank: int, size: int, board: dict[Any, Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.device = rank, size, torch.device("cpu")
        self._board, self._barrier = board, barrier

    def gather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait()
        found = [self._board[rank] for rank in range(self.size)]
        self._barrier.wait()
        return found

    def exchange(self, packed: torch.Tensor, sizes: list[int], lengths: list[int]) -> Sequence[torch.Tensor]:
        received = [pieces[self.rank] for pieces in self.gather(packed.split(sizes))]
        assert [len(piece) for piece in received] == list(lengths)
        assert sizes[self.rank] == 0
        return received


def fragments_of(rank: int, tensor: int, data: int, stage: int) -> tuple[list[list[Fragment]], torch.Tensor]:
    """A rank's fragments as ZeRO lays them out: complete shards, one flat partition, or a part of each."""
    shards = {n: shard_of(n, SPLITS[n], shape, tensor, rank % tensor) for n, shape in SHAPES.items()}
    duplicate = {name: Holding(shard, tensor_duplicate=SPLITS[name] is None) for name, shard in shards.items()}
    place, total = rank // tensor, sum(shard.num_elements for shard in shards.values())
    found, position = [], 0
    flat = torch.zeros(total if stage == 0 else 2 * total)
    for name, shard in shards.items():
        size = shard.num_elements
        if stage == 0:
            first, last = 0, size
        elif stage == 3:
            each = -(-size // data)
            first, last = min(place * each, size), min((place + 1) * each, size)
        else:
            each = -(-total // data)
            first = min(max(place * each - position, 0), size)
            last = min(max((place + 1) * each - position, 0), size)
        if first < last:
            found.append(Fragment(name, first, last - first, flat, position, stage == 0, duplicate[name]))
        position += size
    return [found], flat


def run_threads(size: int, fn: Callable[[Threads], Any]) -> list[Any]:
    board: dict[Any, Any] = {}
    barrier, results = threading.Barrier(size, timeout=20), [None] * size

    def work(rank: int) -> None:
        try:
            results[rank] = fn(Threads(rank, size, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(("tensor", "data"), [(1, 1), (1, 2), (1, 5), (2, 1), (2, 2), (4, 1)])
def test_every_rank_gets_its_part_of_what_one_rank_made(tensor: int, data: int, stage: int) -> None:
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}

    def work(sharers: Threads) -> tuple[list[str], list[tuple[str, Held, torch.Tensor]]]:
        (fragments,), flat = fragments_of(sharers.rank, tensor, data, stage)
        done: list[str] = []

        def change(name: str, matrix: torch.Tensor) -> torch.Tensor:
            done.append(name)
            assert torch.equal(matrix, values[name])
            return 2 * matrix

        updates = {id(flat): torch.zeros_like(flat)}
        for f in fragments:
            part = f.shard.extract(values[f.name])[f.start : f.start + f.length]
            updates[id(flat)][f.offset : f.offset + f.length] = part
        matrix_work = MatrixWork([fragments], COSTS, sharers)  # type: ignore[arg-type]
        matrix_work.run(0, updates, change)
        held = [Held(f.shard, f.start, f.length) for f in fragments]
        got = [updates[id(flat)][f.offset : f.offset + f.length] for f in fragments]
        return done, list(zip([f.name for f in fragments], held, got, strict=True))

    results = run_threads(tensor * data, work)
    assert sorted(name for done, _ in results for name in done) == sorted(SHAPES)
    for _, parts in results:
        for name, held, got in parts:
            assert torch.equal(got, 2 * held.cut(values[name])), name


def test_the_rank_with_least_work_takes_what_many_hold() -> None:
    whole = {name: Held(Shard.whole(shape), 0, 1) for name, shape in SHAPES.items()}
    shares = share_out([whole, whole], {"up": 4.0, "down": 3.0, "qkv": 2.0, "plain": 1.0})
    assert {share.name: share.owner for share in shares} == {"up": 0, "down": 1, "qkv": 1, "plain": 0}
    assert all(share.sources == (share.owner,) for share in shares)


def test_a_rank_that_holds_little_is_no_owner() -> None:
    shard = Shard.whole((4, 8))
    most, few = Held(shard, 0, 24), Held(shard, 24, 8)
    (share,) = share_out([{"down": few}, {}, {"down": most}], {"down": 1.0, "elsewhere": 1.0})
    assert (share.owner, share.sources) == (2, (0, 2))


def test_matrices_without_an_update_are_left_out() -> None:
    one, other = torch.ones(4), torch.ones(6)
    fragments = [
        Fragment(name, 0, tensor.numel(), tensor, 0, True, Holding(Shard.whole(shape)))
        for name, tensor, shape in (("a", one, (2, 2)), ("b", other, (2, 3)))
    ]
    work = MatrixWork([fragments], {"a": 1.0, "b": 1.0}, Sharers(Topology(), 0, torch.device("cpu")))
    updates = {id(other): torch.ones(6)}
    work.run(0, updates, lambda name, matrix: matrix + 1)
    assert updates[id(other)].tolist() == [2.0] * 6


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
    assert update_bytes(MATRICES, 4, 1, 1, 1) == FLOAT * (800 + 4 * 40)
    assert update_bytes(MATRICES, 4, 3, 4, 1) == FLOAT * (200 + 600 + 4 * 40)
    assert update_bytes(Matrices(), 4, 3, 4, 1) == sent_bytes(Matrices(), 3, 4, 1) == 0
