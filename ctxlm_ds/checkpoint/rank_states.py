"""This rank's share of a run's weights and moments: written from where they are trained, or copied and written later.

In: an engine's fragments. Out: the rank's files of a checkpoint, the same bytes either way.
Not here: the other files of a checkpoint (training.py), the files' form (piece_writer.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ctxlm_ds.checkpoint.carried import carried_elements, carried_tensors
from ctxlm_ds.checkpoint.host_copies import ELEMENT_BYTES, HostCopies
from ctxlm_ds.checkpoint.memory import find_shortage, memory_need
from ctxlm_ds.checkpoint.piece_writer import (
    CARRIED_KIND,
    WEIGHT_KIND,
    Flushed,
    ParameterPieces,
    PieceWriter,
    PlannedPieceWriter,
)
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.parallel.shards import Shard
from ctxlm_ds.training.engine import Engine
from ctxlm_ds.training.fragments import Fragment

logger = logging.getLogger("ctxlm_ds")


@dataclass(frozen=True)
class _Piece:
    """A fragment's weights or one of its moments, or a carried tensor."""

    name: str
    kind: str
    start: int
    shard: Shard
    values: torch.Tensor
    """[length], in the memory in which it is trained, or a copy."""

    def add_to(self, writer: PieceWriter) -> None:
        values = self.values.cpu().float()
        writer.add(self.name, self.kind, self.shard.shape, self.start, values, shard=self.shard)


class RankStates:
    """What one rank writes of an engine's states."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._topology = engine.topology
        self._copies: HostCopies | None = None
        self._bytes_looked_at = -1
        self._num_elements: int | None = None
        self._given_up = threading.Event()

    def bytes_of_all_ranks(self) -> int:
        """Size of the weights and moments of the whole model; every rank calls it together."""
        if self._num_elements is None:
            own = sum(fragment.length for fragment in self._engine.fragments() if self._counts(fragment))
            total = self._topology.all_reduce_sum(torch.tensor([float(own)], dtype=torch.float64)).item()
            self._num_elements = int(total)
        states = self._num_elements * ELEMENT_BYTES * self._num_kinds()
        carried = torch.tensor([float(carried_elements(self._engine))], dtype=torch.float64)
        return states + ELEMENT_BYTES * int(self._topology.all_reduce_sum(carried).item())

    def write(self, folder: Path) -> ParameterPieces:
        """Write the pieces one after the other out of the memory in which they are trained; no collective."""
        writer = PieceWriter(folder, self._topology.rank)
        for piece in self._pieces():
            piece.add_to(writer)
        return writer.close()

    def can_be_copied(self) -> bool:
        """Whether all ranks have the memory for copies, which is taken then and kept; every rank calls it together."""
        num_bytes = self.bytes_of_all_ranks()
        if self._bytes_looked_at == num_bytes:
            return self._copies is not None
        self._bytes_looked_at = num_bytes
        self._copies = None
        fragments = self._own_fragments()
        # Also room for the moments that come with the first update.
        own = sum(fragment.length for fragment in fragments) * self._num_kinds() + carried_elements(self._engine)
        shortage = find_shortage(self._topology.all_gather_object(memory_need(own * ELEMENT_BYTES)))
        if shortage is None:
            try:
                self._copies = HostCopies(own, [fragment.owner.device for fragment in fragments])
            except CheckpointError as error:
                shortage = str(error)
        shortages = [found for found in self._topology.all_gather_object(shortage) if found]
        if shortages:
            self._copies = None
            logger.warning(
                "checkpoint.overlap: no memory for copies of weights and moments (%s); training waits while a "
                "checkpoint is written", shortages[0],
            )  # fmt: skip
            return False
        assert self._copies is not None
        self._engine.before_update = self._copies.wait_on_device
        return True

    def copy(self) -> Callable[[Path], Flushed]:
        """Copy the pieces as they are now; the function that writes them, from any thread, before the next copy."""
        copies = self._copies
        assert copies is not None
        pieces = list(self._pieces())
        taken = copies.take([piece.values for piece in pieces])
        pieces = [replace(piece, values=copy) for piece, copy in zip(pieces, taken, strict=True)]

        def write(folder: Path) -> Flushed:
            copies.wait()
            writer = PlannedPieceWriter(folder, self._topology.rank)
            for piece in pieces:
                piece.add_to(writer)
            return writer.write_files(self._check_wanted)

        return write

    def give_up(self) -> None:
        """End the writing of copies with an error."""
        self._given_up.set()

    def _check_wanted(self) -> None:
        if self._given_up.is_set():
            raise CheckpointError("given up, as training ended with an error")

    def _num_kinds(self) -> int:
        """Weights and moments."""
        return 1 + len(self._engine.moment_kinds())

    def _own_fragments(self) -> list[Fragment]:
        """This rank's fragments, and every n-th parameter of what the data-parallel ranks all hold."""
        size, rank = self._topology.data_parallel_size, self._topology.data_parallel_rank
        return [
            fragment
            for index, fragment in enumerate(self._engine.fragments())
            if not fragment.duplicate and (not fragment.replicated or index % size == rank)
        ]

    def _pieces(self) -> Iterator[_Piece]:
        kinds = self._engine.moment_kinds()
        for fragment in self._own_fragments():
            yield _Piece(fragment.name, WEIGHT_KIND, fragment.start, fragment.shard, fragment.weight())
            optimizer_state = self._engine.optimizer_state(fragment.owner)
            # There is none before the first update.
            for kind in kinds if optimizer_state else ():
                moment = fragment.moment(optimizer_state, kind)
                yield _Piece(fragment.name, kind, fragment.start, fragment.shard, moment)
        for name, tensor in carried_tensors(self._engine):
            yield _Piece(name, CARRIED_KIND, 0, Shard.whole(tensor.shape), tensor.flatten())

    def _counts(self, fragment: Fragment) -> bool:
        """Whether the fragment counts here: each element of the model on one rank."""
        elsewhere = fragment.replicated and self._topology.data_parallel_rank != 0
        return not (elsewhere or fragment.duplicate)
