"""This process's place among the ranks, and small collectives on the CPU. Imports torch only where it is used."""

from __future__ import annotations

import os
import pickle
import socket
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ctxlm_ds.errors import ConfigError, mark_from_another_rank

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

T = TypeVar("T")
CPU_GROUP_TIMEOUT = timedelta(hours=1)
"""Longest wait for other ranks in a CPU collective; one may verify a large checkpoint."""
LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"
COMPRESSION = 1
"""zlib's level for gathered objects, whose names and numbers repeat."""


@dataclass(frozen=True)
class Topology:
    """One rank's place in the world and along each parallel axis.

    The collectives below run on the CPU (gloo) with every training backend, so they neither use the accelerator nor
    wait for its queue: for the start, saves and errors. A step uses add_on_device alone. Every rank must call them in
    the same order. One process needs no process group.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_rank: int = 0
    pipeline_parallel_size: int = 1
    context_parallel_rank: int = 0
    context_parallel_size: int = 1
    cpu_group: dist.ProcessGroup | None = None
    """Group of all ranks on gloo; None if there is one process."""
    tensor_group: dist.ProcessGroup | None = None
    """Ranks that share this rank's layers, on the training backend; None without tensor parallelism."""
    replica_group: dist.ProcessGroup | None = None
    """Ranks of this pipeline stage (tensor x context x data); None if these are all ranks."""
    context_group: dist.ProcessGroup | None = None
    """Ranks that share this rank's rows, on the training backend; None without context parallelism."""

    @property
    def is_main(self) -> bool:
        """True for rank 0, which logs, locks and publishes."""
        return self.rank == 0

    @property
    def replica_rank(self) -> int:
        """Number of this rank's copy of the weights, which DeepSpeed calls its data-parallel rank."""
        return self.data_parallel_rank * self.context_parallel_size + self.context_parallel_rank

    @property
    def replica_size(self) -> int:
        """Copies of the weights (context x data), over which gradients are averaged and ZeRO partitions."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def speaks_for_data(self) -> bool:
        """True if this rank counts its data-parallel rank's batches; other ranks of the same model hold the same."""
        return self.tensor_parallel_rank == self.context_parallel_rank == self.pipeline_parallel_rank == 0

    @property
    def speaks_for_losses(self) -> bool:
        """True if this rank reports losses: the last stage computes them, each context-parallel rank its own."""
        return self.tensor_parallel_rank == 0 and self.pipeline_parallel_rank == self.pipeline_parallel_size - 1

    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's picklable `value`, by rank. One process gets the value itself, not a copy."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.cpu_group)
        return gathered

    def gather_some(self, value: T | None) -> dict[int, T]:
        """Return the picklable values of the ranks that have one, by rank; one number is sent if none has."""
        if not self.all_reduce_max([float(value is not None)])[0]:
            return {}
        return {rank: found for rank, found in enumerate(self.all_gather_object(value)) if found is not None}

    def gather_object(self, value: T) -> list[T] | None:
        """Return every rank's picklable `value` by rank on rank 0, and None on other ranks.

        In a binomial tree: rank r passes on what ranks r + 1, r + 2, r + 4, ... sent it. Rank 0 hears from log2(N)
        ranks, and ranks of one node talk to each other first.
        """
        if self.world_size == 1:
            return [value]
        import torch
        import torch.distributed as dist

        values = {self.rank: zlib.compress(pickle.dumps(value), COMPRESSION)}
        on_cpu: Any = {"group": self.cpu_group, "device": torch.device("cpu")}
        distance = 1
        while distance < self.world_size:
            if self.rank & distance:
                dist.send_object_list([values], self.rank - distance, **on_cpu)
                return None
            if self.rank + distance < self.world_size:
                received: list[Any] = [{}]
                dist.recv_object_list(received, self.rank + distance, **on_cpu)
                values |= received[0]
            distance *= 2
        return [pickle.loads(zlib.decompress(values[rank])) for rank in range(self.world_size)]

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's picklable `value` on every rank; values of other ranks are ignored."""
        if self.world_size == 1:
            return value
        import torch
        import torch.distributed as dist

        payload: list[Any] = [value if self.rank == 0 else None]
        dist.broadcast_object_list(payload, src=0, group=self.cpu_group, device=torch.device("cpu"))
        return payload[0]

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of `values` (one shape on every rank), in float64 on the CPU."""
        import torch

        total = values.detach().to(device="cpu", dtype=torch.float64, copy=True)
        if self.world_size > 1:
            import torch.distributed as dist

            dist.all_reduce(total, group=self.cpu_group)
        return total

    def add_on_device(self, values: torch.Tensor) -> torch.Tensor:
        """Add `values` (one shape on every rank) up over all ranks, in place, on the training backend's device.

        The result is ready for what follows on the device's stream; only reading it waits.
        """
        if self.world_size > 1:
            import torch.distributed as dist

            dist.all_reduce(values)
        return values

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each of `values` over all ranks."""
        if self.world_size == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        largest = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.cpu_group)
        return list(largest.tolist())

    def run_on_rank_0(self, action: Callable[[], object]) -> None:
        """Run `action` on rank 0 while the others wait; every rank raises its exception."""

        def run() -> None:
            action()

        self.compute_on_rank_0(run)

    def compute_on_rank_0(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and return its picklable result, or raise its exception, on every rank."""
        result, own = _attempt(action) if self.is_main else (None, None)
        result, shared = self.broadcast_object((result, _portable(own)))
        _raise(own, shared)
        return cast("T", result)

    def run_together(self, action: Callable[[], T]) -> T:
        """Run `action`, which contains no collective, and return its result; every rank raises one rank's exception.

        It is for what may fail on one host only (a folder, a compiler), while other hosts would wait forever.
        """
        result, own = _attempt(action)
        if own is not None and self.world_size > 1 and own.args:
            own.args = (f"{own.args[0]} (on {socket.gethostname()})", *own.args[1:])
        self._raise_together(own)
        return cast("T", result)

    def run_on_rank_0_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0, then on the first rank of every other node, then on the rest; return its result.

        It is for work whose results stay on a disk for other ranks, on a shared disk or on one of each node. Every
        rank raises an exception of any rank.
        """
        turn = 0 if self.is_main else 1 if self.local_rank == 0 else 2
        result: T | None = None
        for now in range(3):
            result, own = _attempt(action) if now == turn else (result, None)
            self._raise_together(own)
        return cast("T", result)

    def _raise_together(self, own: Exception | None) -> None:
        """Raise this rank's exception, or else the first one of other ranks."""
        shared = self.gather_some(_portable(own))
        _raise(own, next(iter(shared.values()), None))


def build_topology(
    local_rank: int = 0,
    local_world_size: int = 1,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    context_parallel_size: int = 1,
) -> Topology:
    """Return the topology of this process; call it on every rank after torch.distributed is initialised.

    The order of ranks is tensor-parallel first (neighbours share layers, so they are on one node), then
    context-parallel, data-parallel, and pipeline stages: Megatron's default order. DeepSpeed and Megatron take context
    x data for data-parallel ranks. Raises ConfigError if the world does not split into models of that many ranks.
    """
    import torch.distributed as dist

    model_size = tensor_parallel_size * context_parallel_size * pipeline_parallel_size
    alone = not (dist.is_available() and dist.is_initialized())
    rank, world_size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    if world_size % model_size:
        raise ConfigError(
            f"parallel: {world_size} ranks do not split into groups of tensor_parallel_size {tensor_parallel_size} x "
            f"context_parallel_size {context_parallel_size} x pipeline_parallel_size {pipeline_parallel_size}"
        )
    if alone:
        return Topology(local_rank=local_rank, local_world_size=local_world_size)
    cpu_group = None
    if world_size > 1:
        cpu_group = dist.group.WORLD if dist.get_backend() == "gloo" else _gloo_group()
    data_parallel_size = world_size // model_size
    replicas = data_parallel_size * context_parallel_size
    tensor_group = replica_group = None
    if tensor_parallel_size > 1:
        tensor_group, replica_group = _megatron_groups(tensor_parallel_size, pipeline_parallel_size)
    elif pipeline_parallel_size > 1:
        # The ranks of a stage are consecutive.
        groups = [dist.new_group(range(first, first + replicas)) for first in range(0, world_size, replicas)]
        replica_group = groups[rank // replicas]
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        data_parallel_rank=rank // (tensor_parallel_size * context_parallel_size) % data_parallel_size,
        data_parallel_size=data_parallel_size,
        tensor_parallel_rank=rank % tensor_parallel_size,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_rank=rank // (tensor_parallel_size * replicas),
        pipeline_parallel_size=pipeline_parallel_size,
        context_parallel_rank=rank // tensor_parallel_size % context_parallel_size,
        context_parallel_size=context_parallel_size,
        cpu_group=cpu_group,
        tensor_group=tensor_group,
        replica_group=replica_group,
        context_group=context_group(rank, world_size, tensor_parallel_size, context_parallel_size),
    )


def context_group(rank: int, world_size: int, tensor: int, context: int) -> Any:
    """Make the groups of ranks that share rows, in one order on all ranks; return this rank's, or None."""
    import torch.distributed as dist

    if context == 1:
        return None
    firsts = (block + first for block in range(0, world_size, tensor * context) for first in range(tensor))
    members = [range(first, first + tensor * context, tensor) for first in firsts]
    groups = [(ranks, dist.new_group(ranks)) for ranks in members]
    return next(group for ranks, group in groups if rank in ranks)


def _gloo_group() -> Any:
    """Make a gloo group of all ranks that connects two ranks when they first talk, not every rank to every other."""
    import torch.distributed as dist

    is_users = LAZY_VARIABLE in os.environ
    os.environ.setdefault(LAZY_VARIABLE, "1")
    try:
        return dist.new_group(backend="gloo", timeout=CPU_GROUP_TIMEOUT)
    finally:
        if not is_users:
            del os.environ[LAZY_VARIABLE]


def _megatron_groups(tensor_parallel_size: int, pipeline_parallel_size: int) -> tuple[Any, Any]:
    """Make megatron-core's groups, which its layers and cross entropy use; return tensor, and tensor x data."""
    try:
        from ctxlm_ds.parallel.megatron import parallel_state
    except ImportError as error:
        raise ConfigError(
            f"parallel.tensor_parallel_size: {tensor_parallel_size} needs megatron-core, which cannot be imported "
            f"({error}); pip install 'megatron-core>=0.16.1,<0.17'"
        ) from error
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_parallel_size,
            pipeline_model_parallel_size=pipeline_parallel_size,
            create_gloo_process_groups=False,
        )
    return parallel_state.get_tensor_model_parallel_group(), parallel_state.get_tensor_and_data_parallel_group()


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, error


def _portable(error: Exception | None) -> Exception | None:
    """Return an exception that other ranks can unpickle."""
    if error is None:
        return None
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = None
    return copy if isinstance(copy, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


def _raise(own: Exception | None, shared: Exception | None) -> None:
    if own is not None:
        raise own
    if shared is not None:
        mark_from_another_rank(shared)
        raise shared
