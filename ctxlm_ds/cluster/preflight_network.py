"""What a preflight measures between nodes: clocks and round trips by plain sockets, then timed all-reduces.

In: another node's name and port, or a task of a step. Out: round trip and clock offset in seconds; a record a round,
with the bandwidth or the error. The reductions run within a node, between pairs of nodes and over all ranks. Pairs tell
which node is slow: a good node is slow only with a bad partner. Each round is a child process of its own, which is
killed when its time is up: whatever hangs (CUDA, NCCL, a partner that died) costs one round. Not here: who asks whom
(preflight_rank.py), what is too much or too slow (preflight_judgement.py).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ctxlm_ds.process.slurm import SlurmTask, expand_tasks

MAX_PAIR_ROUNDS = 5
ITERATIONS = 5
PROBE_BYTES = 1 << 20
LONGEST_S = 1.0
GRACE_S = 2.0
FIRST_ROUND_PORT = 1
"""Rounds meet at the step's port plus this, and the following ones."""
_TIME = struct.Struct("!d")
ROUND_TRIPS = 9
BACKLOG = 256


@dataclass(frozen=True)
class Round:
    """Ranks that reduce together."""

    name: str
    """`node`, `all`, or the partner's node."""
    kind: str
    """`node`, `pair` or `all`."""
    ranks: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    """Of the ranks, those that reduce with each other at the same time: in a pair, the equal local ranks."""
    host: str
    """Where the first rank lives."""
    port: int


def measure_bandwidth(task: SlurmTask, limit_s: float, num_bytes: int) -> Iterator[dict[str, Any]]:
    """A growing record `{"rounds": [...]}` after each round.

    Args:
        task: of a step whose ranks lie block by block on the hosts.
        limit_s: for one round; later ones get more, because a partner may come late.
        num_bytes: size of a reduction.
    """
    rounds: list[dict[str, Any]] = []
    yield {"rounds": rounds}
    # Once for all children; CUDA is touched in them only.
    import torch
    import torch.distributed  # noqa: F401

    for number, round_ in enumerate(rounds_of(task, node_ranks(task)), start=1):
        # A partner may have lost a whole earlier round to a bad node.
        result = run_round(round_, task, number * limit_s, num_bytes)
        rounds.append({"name": round_.name, "kind": round_.kind, **result})
        yield {"rounds": rounds}
    yield {"rounds": rounds, "done": True}


def node_ranks(task: SlurmTask) -> list[list[int]]:
    """Ranks of each host, block by block."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE")
    counts = expand_tasks(text) if text else []
    if len(counts) != len(task.hosts) or sum(counts) != task.world_size:
        counts = [task.world_size // len(task.hosts)] * len(task.hosts)
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return [list(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]


def pairings(count: int, most: int = MAX_PAIR_ROUNDS) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs of `count` nodes, each pair once (a round-robin tournament), at most so many rounds."""
    seats = list(range(count + count % 2))
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        seats[1:] = [seats[-1], *seats[1:-1]]
    step = max(1, len(rounds) // most)
    return rounds[::step][:most]


def rounds_of(task: SlurmTask, ranks: Sequence[Sequence[int]]) -> list[Round]:
    """The rounds of this rank, in an order that suits every rank."""
    node = next(index for index, members in enumerate(ranks) if task.rank in members)
    port = task.port + FIRST_ROUND_PORT
    found = []
    own = tuple(ranks[node])
    if len(own) > 1:
        found.append(Round("node", "node", own, (own,), task.hosts[node], port))
    for number, pairs in enumerate(pairings(len(ranks)), start=1):
        for first, second in pairs:
            if node in (first, second):
                members = (*ranks[first], *ranks[second])
                groups = tuple(zip(ranks[first], ranks[second], strict=False))
                partner = task.hosts[second if node == first else first]
                found.append(Round(partner, "pair", members, groups, task.hosts[first], port + number))
    if len(ranks) > 1:
        everyone = tuple(rank for members in ranks for rank in members)
        found.append(Round("all", "all", everyone, (everyone,), task.hosts[0], port + MAX_PAIR_ROUNDS + 1))
    return found


def run_round(round_: Round, task: SlurmTask, limit_s: float, num_bytes: int) -> dict[str, Any]:
    """A round in a child process: `{"gb_per_s": ...}` or `{"error": ...}`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(round_, task, limit_s, num_bytes, writer)
    os.close(writer)
    try:
        text = _read_all(reader, time.monotonic() + limit_s + GRACE_S)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not text:
        return {"error": f"no answer within {limit_s:.0f} s"}
    result: dict[str, Any] = json.loads(text)
    return result


def _read_all(reader: int, deadline_s: float) -> str:
    data = b""
    while (left_s := deadline_s - time.monotonic()) > 0 and select.select([reader], [], [], left_s)[0]:
        part = os.read(reader, 1 << 16)
        if not part:
            break
        data += part
    return data.decode() if data.endswith(b"\n") else ""


def _child(round_: Round, task: SlurmTask, limit_s: float, num_bytes: int, writer: int) -> None:
    """Measure, tell the parent, and be gone without any library's farewell."""
    try:
        result: dict[str, Any] = {"gb_per_s": reduce_timed(round_, task, limit_s, num_bytes)}
    except BaseException as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        result = {"error": lines[0][:300]}
    os.write(writer, (json.dumps(result) + "\n").encode())
    os._exit(0)


def reduce_timed(round_: Round, task: SlurmTask, limit_s: float, num_bytes: int) -> float | None:
    """Bandwidth in GB/s of this rank's group as nccl-tests counts it (what each rank sends and receives); None if it
    has no peer.

    Raises:
        Exception: whatever torch.distributed raises.
    """
    from datetime import timedelta

    import torch
    from torch import distributed

    torch.set_num_threads(1)
    with_cuda = torch.cuda.is_available()
    if with_cuda:
        torch.cuda.set_device(task.local_rank % torch.cuda.device_count())
    distributed.init_process_group(
        "nccl" if with_cuda else "gloo",
        init_method=f"tcp://{round_.host}:{round_.port}",
        rank=round_.ranks.index(task.rank),
        world_size=len(round_.ranks),
        timeout=timedelta(seconds=limit_s),
    )
    members = [[round_.ranks.index(rank) for rank in group] for group in round_.groups]
    handles = [distributed.new_group(group) for group in members] if len(members) > 1 else [None]
    own = next((i for i, group in enumerate(round_.groups) if task.rank in group), None)
    figure = None
    if own is not None:
        device = torch.device("cuda", torch.cuda.current_device()) if with_cuda else torch.device("cpu")
        seconds, size = _time_reductions(handles[own], device, num_bytes)
        count = len(round_.groups[own])
        figure = 2 * (count - 1) / count * size / seconds / 1e9
    # Nobody leaves while others still use the store of the first rank.
    distributed.barrier()
    return figure


def _time_reductions(group: Any, device: Any, num_bytes: int) -> tuple[float, int]:
    """Median seconds of a reduction and its bytes, which are fewer where `num_bytes` would take too long."""
    import torch
    from torch import distributed

    def reduce(values: torch.Tensor) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        distributed.all_reduce(values, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start_s

    small = torch.zeros(min(PROBE_BYTES, num_bytes) // 4, device=device)
    reduce(small)
    slowest = torch.tensor([reduce(small)], device=device)
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX, group=group)
    affordable = int(small.nbytes * LONGEST_S / max(float(slowest), 1e-6))
    size = max(small.nbytes, min(num_bytes, affordable)) // 4 * 4
    values = torch.zeros(size // 4, device=device)
    reduce(values)
    return statistics.median(reduce(values) for _ in range(ITERATIONS)), size


class ClockServer:
    """Answers each byte with this node's time, on a port of the system's choice, until the process ends."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._listener = socket.create_server(("", 0), backlog=BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, name="preflight-clock", daemon=True).start()

    def close(self) -> None:
        """Refuse further connections."""
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while connection.recv(1):
                    connection.sendall(_TIME.pack(self._clock()))
            except OSError:
                return


@dataclass(frozen=True)
class RoundTrip:
    """The quickest of several exchanges with another node."""

    round_trip_s: float
    offset_s: float
    """What its clock shows more than this node's; known to within half the round trip."""


def measure_clock(host: str, port: int, timeout_s: float, clock: Callable[[], float] = time.time) -> RoundTrip:
    """Exchange times with a ClockServer.

    Raises:
        OSError: the node cannot be reached or does not answer in time.
    """
    best: RoundTrip | None = None
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ROUND_TRIPS):
            before_s, sent_s = clock(), time.monotonic()
            connection.sendall(b"?")
            theirs_s = _TIME.unpack(_receive(connection, _TIME.size))[0]
            trip_s = time.monotonic() - sent_s
            if best is None or trip_s < best.round_trip_s:
                best = RoundTrip(trip_s, theirs_s - (before_s + trip_s / 2))
    assert best is not None
    return best


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data
