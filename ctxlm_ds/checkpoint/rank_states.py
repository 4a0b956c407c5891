"""This rank's part of a run's weights and moments: written directly, or copied first and written in the background.

The files have the same bytes either way. Copies are stored in CPU memory that is kept from one save to the next. On
CUDA this memory is page-locked and the copies run on a separate stream, so `HostCopies.wait_on_device` must come before
the states change.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from psutil import virtual_memory

from ctxlm_ds.checkpoint.chunk_index import CARRIED_KIND, FP32_BYTES, WEIGHT_KIND, ChunkWriter, LazyTensor, WrittenFiles
from ctxlm_ds.console import logger
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.parallel.placement import Shard
from ctxlm_ds.process.cgroups import CGROUP_ROOT, OWN_CGROUPS, memory_left
from ctxlm_ds.training.engine.engine import Engine
from ctxlm_ds.training.engine.fragments import Fragment

PORTABLE = 1
"""cudaHostRegisterPortable"""
USABLE_SHARE = 0.8
"""Part of the available memory that copies may take; data workers and evaluations need some later."""


class _Chunk(NamedTuple):
    """A fragment's weights or one of its moments, or a carried tensor."""

    name: str
    kind: str
    start: int
    shard: Shard
    values: LazyTensor
    """The memory in which it is trained, or a copy."""


class RankStates:
    """What one rank writes of an engine's states."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._topology = engine.topology
        self._copies: HostCopies | None = None
        self._checked_bytes = -1
        self.given_up = threading.Event()
        """Ends the writing of copies with an error once it is set."""

    def bytes_of_all_ranks(self) -> int:
        """Return the size of all weights, moments and carried tensors; every rank calls this together."""
        own = torch.tensor([float(self._own_elements())], dtype=torch.float64)
        return int(self._topology.all_reduce_sum(own).item()) * FP32_BYTES

    def _own_elements(self) -> int:
        """Count this rank's weights and carried tensors, and the moments that come with the first update."""
        carried = sum(tensor.numel() for _, tensor in self._carried())
        kinds = self._engine.moment_kinds()
        return sum(f.length * (1 + len(kinds[f.name])) for f in self._own_fragments()) + carried

    def write(self, folder: Path) -> WrittenFiles:
        """Write the chunks one by one from the memory in which they are trained; no collective."""
        return self._write(folder, self._chunks())

    def can_be_copied(self) -> bool:
        """Return whether all ranks have taken the memory for copies, which is kept; every rank calls this together."""
        num_bytes = self.bytes_of_all_ranks()
        if self._checked_bytes == num_bytes:
            return self._copies is not None
        self._checked_bytes = num_bytes
        self._copies = None
        own = self._own_elements()
        needs = self._topology.gather_object(memory_need(own * FP32_BYTES))
        shortage = self._topology.broadcast_object(find_shortage(needs or []))
        if shortage is None:
            try:
                self._copies = HostCopies(own, [fragment.owner.device for fragment in self._own_fragments()])
            except CheckpointError as error:
                shortage = str(error)
        shortages = self._topology.gather_some(shortage)
        if shortages:
            self._copies = None
            logger.warning(
                "checkpoint.overlap: no memory for copies of weights and moments (%s); training waits while a "
                "checkpoint is written", next(iter(shortages.values())),
            )  # fmt: skip
            return False
        assert self._copies is not None
        self._engine.before_update = self._copies.wait_on_device
        return True

    def copy(self) -> Callable[[Path], WrittenFiles]:
        """Copy the chunks now; return the function that writes the copies, from any thread, before the next copy."""
        copies = self._copies
        assert copies is not None
        chunks = list(self._chunks())
        taken = copies.take([chunk.values for chunk in chunks])
        chunks = [chunk._replace(values=copy) for chunk, copy in zip(chunks, taken, strict=True)]

        def write(folder: Path) -> WrittenFiles:
            copies.wait()
            return self._write(folder, chunks)

        return write

    def _write(self, folder: Path, chunks: Iterable[_Chunk]) -> WrittenFiles:
        writer = ChunkWriter(folder, self._topology.rank)
        for chunk in chunks:
            writer.add(chunk.name, chunk.kind, chunk.shard.shape, chunk.start, chunk.values, chunk.shard)
        return writer.write(self._check_wanted)

    def _check_wanted(self) -> None:
        if self.given_up.is_set():
            raise CheckpointError("given up because training ended with an error")

    def _own_fragments(self) -> list[Fragment]:
        """Return this rank's fragments, and every n-th parameter of those that all copies of the weights hold."""
        size, rank = self._topology.replica_size, self._topology.replica_rank
        return [
            fragment
            for index, fragment in enumerate(self._engine.fragments())
            if not fragment.duplicate and (not fragment.replicated or index % size == rank)
        ]

    def _chunks(self) -> Iterator[_Chunk]:
        kinds = self._engine.moment_kinds()
        for fragment in self._own_fragments():
            chunk = partial(_Chunk, fragment.name, start=fragment.start, shard=fragment.shard)
            yield chunk(kind=WEIGHT_KIND, values=LazyTensor(fragment.length, fragment.weight))
            optimizer_state = self._engine.optimizer_state(fragment.owner)
            # It is empty before the first update.
            for kind in (kind for kind in kinds[fragment.name] if kind in optimizer_state):
                read = partial(fragment.moment, optimizer_state, kind)
                yield chunk(kind=kind, values=LazyTensor(fragment.length, read))
        for name, tensor in self._carried():
            yield _Chunk(name, CARRIED_KIND, 0, Shard.whole(tensor.shape), LazyTensor(tensor.numel(), tensor.flatten))

    def _carried(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return carried tensors by name on the first tensor-parallel rank; the others hold the same."""
        return self._engine.carried_tensors().items() if self._topology.tensor_parallel_rank == 0 else ()


class HostCopies:
    """One flat buffer of CPU memory for fp32 values of states on `devices`. Raises CheckpointError without memory."""

    def __init__(self, num_elements: int, devices: Iterable[torch.device]) -> None:
        try:
            memory = mmap.mmap(-1, max(1, num_elements) * FP32_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"no memory for copies of {num_elements * FP32_BYTES / 1e9:.1f} GB ({error})"
            ) from error
        # After a fork of a data worker, each page that is written to would be copied.
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_DONTFORK)
        self._flat = torch.frombuffer(memory, dtype=torch.float32, count=max(1, num_elements))
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._device = next((device for device in devices if device.type == "cuda"), None)
        if self._device is not None:
            self._stream = torch.cuda.Stream(self._device)
            _page_lock(self._flat, self._device)

    def take(self, sources: Sequence[LazyTensor]) -> list[LazyTensor]:
        """Copy 1-D tensors of together at most `num_elements` elements; this overwrites earlier copies.

        On CUDA the copies are complete after `wait`.
        """
        copies = []
        offset = 0
        with self._on_copy_stream():
            for source in sources:
                copy = self._flat.narrow(0, offset, source.length)
                copy.copy_(source.read().detach(), non_blocking=True)
                copies.append(LazyTensor(source.length, copy.detach))
                offset += source.length
        return copies

    @contextlib.contextmanager
    def _on_copy_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)

    def wait(self) -> None:
        """Wait until the copies are complete; from any thread."""
        if self._copied is not None:
            self._copied.synchronize()

    def wait_on_device(self) -> None:
        """Make later GPU work wait for the copies."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)


def _page_lock(memory: torch.Tensor, device: torch.device) -> None:
    """Let the device copy into CPU memory directly; if that is refused, copies are slower and synchronous."""
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE)) == 0:
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
        return
    # The next kernel launch would report this refusal as its own failure.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def memory_need(
    needed_bytes: int, own_cgroups: Path = OWN_CGROUPS, root: Path = CGROUP_ROOT
) -> dict[str, tuple[int, int]]:
    """Return what this rank needs and what is available to it now, in bytes, by the machine or cgroup with a limit.

    Ranks with the same name share the memory.
    """
    host = socket.gethostname()
    available = {f"{host}, cgroup {name}": left for name, left in memory_left(root, own_cgroups).items()}
    available[host] = virtual_memory().available
    return {place: (needed_bytes, left) for place, left in available.items()}


def find_shortage(needs: Sequence[Mapping[str, tuple[int, int]]]) -> str | None:
    """Explain which memory limit the ranks together would exceed; None if all fit."""
    for place in dict.fromkeys(chain(*needs)):
        wanted, available = zip(*(need[place] for need in needs if place in need), strict=True)
        if sum(wanted) > min(available) * USABLE_SHARE:
            return f"{sum(wanted) / 1e9:.1f} GB wanted, {min(available) / 1e9:.1f} GB available on {place}"
    return None
