"""This rank's share of a run's weights and moments: written from where they are trained, or copied and written later.

In: an engine's fragments. Out: the rank's files of a checkpoint, the same bytes either way. Copies lie in CPU memory
that is kept from one save to the next; on CUDA it is page-locked and the copies run on a stream of their own, so
`HostCopies.wait_on_device` must come before the states change. Not here: the other files of a checkpoint (training.py),
the files' form (pieces.py).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ctxlm_ds.checkpoint.carried import carried_elements, carried_tensors
from ctxlm_ds.checkpoint.pieces import (
    CARRIED_KIND,
    WEIGHT_KIND,
    Flushed,
    ParameterPieces,
    PieceWriter,
    PlannedPieceWriter,
)
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.parallel.shards import Shard
from ctxlm_ds.process.cgroups import CGROUP_ROOT, OWN_CGROUPS, memory_left, read_text
from ctxlm_ds.training.engine import Engine
from ctxlm_ds.training.fragments import Fragment

logger = logging.getLogger("ctxlm_ds")
ELEMENT_BYTES = 4
PORTABLE = 1
"""cudaHostRegisterPortable"""
MEMINFO = Path("/proc/meminfo")
USABLE_SHARE = 0.8
"""Of what is available: data workers and evaluations take some too, later."""


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


class HostCopies:
    """One flat buffer of CPU memory.

    Args:
        num_elements: fp32 numbers that it holds.
        devices: that the states are on, perhaps the CPU among them.

    Raises:
        CheckpointError: the memory cannot be had.
    """

    def __init__(self, num_elements: int, devices: Iterable[torch.device]) -> None:
        try:
            memory = mmap.mmap(-1, max(1, num_elements) * ELEMENT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"no memory for copies of {num_elements * ELEMENT_BYTES / 1e9:.1f} GB ({error})"
            ) from error
        # A forked data worker would make each page that is written to a second one.
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_DONTFORK)
        self._flat = torch.frombuffer(memory, dtype=torch.float32, count=max(1, num_elements))
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._device = next((device for device in devices if device.type == "cuda"), None)
        if self._device is not None:
            self._stream = torch.cuda.Stream(self._device)
            _page_lock(self._flat, self._device)

    def take(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of 1-D tensors, together at most `num_elements` long; what the buffer held before is gone.

        On CUDA they are complete once `wait` returns.
        """
        copies = []
        place = 0
        with self._beside_the_computation():
            for source in sources:
                copy = self._flat.narrow(0, place, source.numel())
                copy.copy_(source.detach(), non_blocking=True)
                copies.append(copy)
                place += source.numel()
        return copies

    @contextlib.contextmanager
    def _beside_the_computation(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)

    def wait(self) -> None:
        """Until the copies are complete; from any thread."""
        if self._copied is not None:
            self._copied.synchronize()

    def wait_on_device(self) -> None:
        """Have what the device is given from now on come after the copies."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)


def _page_lock(memory: torch.Tensor, device: torch.device) -> None:
    """Let the device copy into CPU memory by itself; where that is refused, copies are slower and waited for."""
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE)) == 0:
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
        return
    # The next launch of a kernel would take the refusal for its own failure.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


@dataclass(frozen=True)
class MemoryNeed:
    """What one rank wants to take, and the places that it comes out of."""

    needed_bytes: int
    available_bytes: dict[str, int]
    """By name of the place: a machine, a cgroup with a limit. Ranks with the same name share it."""


def memory_need(
    needed_bytes: int, meminfo: Path = MEMINFO, own_cgroups: Path = OWN_CGROUPS, root: Path = CGROUP_ROOT
) -> MemoryNeed:
    """Set this rank's need beside what is available to it now."""
    host = socket.gethostname()
    available = {f"{host}, cgroup {name}": left for name, left in memory_left(root, own_cgroups).items()}
    for line in read_text(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            available[host] = int(line.split()[1]) * 1024
    return MemoryNeed(needed_bytes, available)


def find_shortage(needs: Sequence[MemoryNeed]) -> str | None:
    """Explain which memory limit the ranks together would exceed; None if all fit."""
    wanted: dict[str, int] = {}
    available: dict[str, int] = {}
    for need in needs:
        for place, bytes_there in need.available_bytes.items():
            wanted[place] = wanted.get(place, 0) + need.needed_bytes
            available[place] = min(bytes_there, available.get(place, bytes_there))
    for place, wanted_bytes in wanted.items():
        if wanted_bytes > available[place] * USABLE_SHARE:
            return f"{wanted_bytes / 1e9:.1f} GB wanted, {available[place] / 1e9:.1f} GB available on {place}"
    return None
