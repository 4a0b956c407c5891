"""The work on complete matrices, shared out over the ranks that hold fragments of them.

One rank, the owner, gets the fragments of a matrix, computes, and sends the result to every rank that holds a part. It
is a rank that holds about as much of the matrix as any, so that stages 1 and 2 send little, and of these the one with
the least work. The matrices of a round are updated together, with one exchange in each direction. The planner's figures
of messages and memory are estimates: which ranks share a matrix depends on where ZeRO's partitions end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from ctxlm_ds.parallel.parameters import ParameterFacts
from ctxlm_ds.parallel.placement import Shard
from ctxlm_ds.training.engine.fragments import Fragment
from ctxlm_ds.training.optimizers.base import FLOAT
from ctxlm_ds.training.optimizers.steps import Sharers

Change = Callable[[str, torch.Tensor], torch.Tensor]
"""Maps the name of a parameter and its full value to another value of the same shape."""


@dataclass(frozen=True, slots=True)
class Held:
    """The range of a parameter that a rank holds."""

    shard: Shard
    start: int
    length: int

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Return the range of a full parameter, [length]."""
        flat = full.reshape(-1) if self.shard.is_whole else self.shard.extract(full)
        return flat.narrow(0, self.start, self.length)


@dataclass(frozen=True, slots=True)
class Share:
    """The ranks that hold one matrix, and which of them does the work."""

    name: str
    held: Mapping[int, Held]
    """By rank."""
    owner: int
    sources: tuple[int, ...]
    """Ranks whose ranges the owner takes: of those with equal ranges one, the owner if it is among them."""

    def assemble(self, pieces: Mapping[int, torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return the full matrix from the ranges of the sources."""
        shape = self.held[self.owner].shard.shape
        if len(pieces) == 1:
            return pieces[self.owner].to(device).view(shape)
        full = torch.zeros(shape, dtype=pieces[self.owner].dtype, device=device)
        for rank, piece in pieces.items():
            self.held[rank].shard.place(full, piece.to(device), self.held[rank].start)
        return full


class Round:
    """What one rank sends and receives to change some matrices."""

    def __init__(self, shares: Sequence[Share], rank: int, size: int) -> None:
        self.shares = shares
        self.is_local = all(share.held.keys() == {share.owner} for share in shares)
        """True if no rank sends anything."""
        self.owned = [share for share in shares if share.owner == rank]
        self.gathered_to: list[list[str]] = [[] for _ in range(size)]
        """Matrices whose range this rank sends to each owner."""
        self.gathered_from: list[list[int]] = [[] for _ in range(size)]
        """Lengths of the ranges that this rank is sent by each rank, as owner."""
        self.returned_from: list[list[int]] = [[] for _ in range(size)]
        """Lengths of the ranges that each owner returns."""
        for share in shares:
            if share.owner == rank:
                for source in share.sources:
                    if source != rank:
                        self.gathered_from[source].append(share.held[source].length)
            elif rank in share.held:
                self.returned_from[share.owner].append(share.held[rank].length)
                if rank in share.sources:
                    self.gathered_to[share.owner].append(share.name)


class MatrixWork:
    """Changes complete matrices whose fragments are spread over ranks."""

    def __init__(self, rounds: Sequence[Sequence[Fragment]], costs: Mapping[str, float], sharers: Sharers) -> None:
        """Share out the matrices; all ranks call it.

        `rounds` are this rank's fragments; ranks have as many rounds, of the same matrices. `costs` is the work on each
        matrix, in any unit, in an order common to all ranks.
        """
        self._sharers = sharers
        self._rank, size = sharers.rank, sharers.size
        self._fragments = [{fragment.name: fragment for fragment in own if fragment.length} for own in rounds]
        own = [{f.name: Held(f.shard, f.start, f.length) for f in found.values()} for found in self._fragments]
        shares = [share_out(held, costs) for held in zip(*sharers.gather(own), strict=True)]
        self._round_without = cache(
            lambda number, left_out: Round([s for s in shares[number] if s.name not in left_out], self._rank, size)
        )

    def run(self, number: int, updates: Mapping[int, torch.Tensor], change: Change) -> None:
        """Replace the matrices of a round by what `change` makes of them; all ranks call it.

        `updates` has, by the id of each owner tensor, a tensor of its shape, which is changed in place. Matrices
        without one are left out, the same on all ranks. `change` is called on one rank for each matrix, on the device
        of the sharers.
        """
        fragments = self._fragments[number]
        values = {
            name: updates[id(fragment.owner)].view(-1).narrow(0, fragment.offset, fragment.length)
            for name, fragment in fragments.items()
            if id(fragment.owner) in updates
        }
        now = self._round_without(number, frozenset(fragments.keys() - values.keys()))
        sent = [[values[name] for name in names] for names in now.gathered_to]
        received = self._exchange(now, sent, now.gathered_from)
        results: list[list[torch.Tensor]] = [[] for _ in sent]
        for share in now.owned:
            own = values[share.name]
            pieces = {rank: own if rank == self._rank else next(received[rank]) for rank in share.sources}
            changed = change(share.name, share.assemble(pieces, self._sharers.device))
            own.copy_(share.held[self._rank].cut(changed))
            for rank in share.held.keys() - {self._rank}:
                results[rank].append(share.held[rank].cut(changed))
        returned = self._exchange(now, results, now.returned_from)
        for share in now.shares:
            if share.owner != self._rank and share.name in values:
                values[share.name].copy_(next(returned[share.owner]))

    def _exchange(
        self, now: Round, sent: Sequence[Sequence[torch.Tensor]], lengths: Sequence[Sequence[int]]
    ) -> list[Iterator[torch.Tensor]]:
        """Send tensors to each rank, and return those that come from each, of the given lengths."""
        if now.is_local:
            return [iter(()) for _ in sent]
        flat = [tensor for tensors in sent for tensor in tensors]
        packed = torch.cat(flat) if flat else torch.empty(0)
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        received = self._sharers.exchange(packed.to(self._sharers.device), sizes, [sum(each) for each in lengths])
        return [iter(part.split(list(each))) for part, each in zip(received, lengths, strict=True)]


def share_out(held: Sequence[Mapping[str, Held]], costs: Mapping[str, float]) -> list[Share]:
    """Choose an owner for each matrix of `costs` that any rank holds; `held` is what each rank holds of each matrix."""
    load = [0.0] * len(held)
    found: dict[str, Share] = {}
    for name in sorted(costs, key=lambda name: -costs[name]):
        by_rank = {rank: own[name] for rank, own in enumerate(held) if name in own}
        if not by_rank:
            continue
        half = max(part.length for part in by_rank.values()) / 2
        owner = min((rank for rank, part in by_rank.items() if part.length >= half), key=load.__getitem__)
        load[owner] += costs[name]
        first = {part: rank for rank, part in reversed(by_rank.items())} | {by_rank[owner]: owner}
        found[name] = Share(name, by_rank, owner, tuple(sorted(first.values())))
    return [found[name] for name in costs if name in found]


class Matrices(NamedTuple):
    """The matrices that one rank of a pipeline stage holds before ZeRO."""

    elements: int = 0
    """Of this tensor-parallel rank's shards."""
    largest: int = 0
    """Of the largest complete matrix."""
    flops: float = 0.0
    """Operations of the updates of all complete matrices."""


def blocks_of(facts: ParameterFacts, rows: int) -> list[int]:
    """Return the rows of each matrix that a parameter consists of (query, key and value are separate)."""
    return list(facts.split.blocks if facts.split else ()) or [rows]


def sent_bytes(matrices: Matrices, zero_stage: int, data: int, tensor: int) -> int:
    """Return the bytes of updates and results that a rank sends in a step.

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


def update_bytes(matrices: Matrices, copies: int, zero_stage: int, data: int, tensor: int) -> int:
    """Return the memory of the update: one tensor of a rank's share, what is sent and received, and `copies`."""
    share = matrices.elements // (data if zero_stage else 1)
    held = share + 2 * sent_bytes(matrices, zero_stage, data, tensor) // FLOAT
    return FLOAT * (held + copies * matrices.largest) if matrices.elements else 0
