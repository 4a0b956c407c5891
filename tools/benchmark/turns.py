"""Sides of a benchmark that take turns, each in a separate process.

A separate process has its allocator, page faults, peak memory and imports to itself, so no side pays for or profits
from what another one has done. The turns alternate, so a machine whose speed drifts favours no side.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from ctxlm_ds.errors import ConfigError, CtxlmError
from tools.benchmark.process_counters import DeviceCalls, StepRecorder, cpu_page_faults, peak_bytes
from tools.benchmark.tables import Table

StepDone = Callable[[], None]
TURN, FACTS = "turn", "facts"
SHORTEST_TURN_S = 0.5
CONTEXT = multiprocessing.get_context("spawn")


class Side(Protocol):
    """One side: it is pickled, and builds everything in its process."""

    def run(self, step_done: StepDone) -> None:
        """Take steps forever, and call `step_done` after each."""


@dataclass(frozen=True)
class Turn:
    """Some consecutive steps; every figure is that of one step."""

    seconds: float
    cpu_seconds: float
    """Over all threads."""
    page_faults: float


@dataclass(frozen=True)
class Facts:
    """What is known of a side after its turns."""

    peak_bytes: int
    """Of the device; on a CPU the resident memory of the process."""
    calls: DeviceCalls | None
    """Of one step; None on a CPU."""
    kernels: Table | None = None
    """Time of one step by class of kernel; None on a CPU."""


class _Finished(Exception):
    """No further turn comes."""


class _Clock:
    """The side's end of the connection: it counts steps, times turns, and waits for the next."""

    def __init__(self, connection: Connection, started_s: float) -> None:
        self._connection, self._started_s = connection, started_s
        self._left, self._warm, self._is_first = 1, 0, True
        self._begun = (0.0, 0.0, 0)
        self._steps = 0
        self._is_recorded = False
        self._profile: Any = None

    def step_done(self) -> None:
        """End a step. After the last one of a turn, report the turn and wait for the next."""
        if self._warm:
            self._warm -= 1
            if not self._warm:
                self._begin()
            return
        self._left -= 1
        if self._left:
            return
        if self._profile is not None:
            self._connection.send(Facts(peak_bytes(), *self._profile.stop()))
            self._profile = None
        else:
            _synchronize()
            self._report()
        self._wait()

    def _begin(self) -> None:
        _synchronize()
        if self._is_recorded:
            self._is_recorded, self._profile = False, StepRecorder()
        self._begun = (time.perf_counter(), time.process_time(), cpu_page_faults())

    def _report(self) -> None:
        if self._is_first:
            self._is_first = False
            self._connection.send(time.monotonic() - self._started_s)
            return
        ended = (time.perf_counter(), time.process_time(), cpu_page_faults())
        seconds, cpu_seconds, faults = (b - a for a, b in zip(self._begun, ended, strict=True))
        self._connection.send(Turn(seconds / self._steps, cpu_seconds / self._steps, faults / self._steps))

    def _wait(self) -> None:
        _empty_cache()
        try:
            kind, self._steps = self._connection.recv()
        except EOFError:
            raise _Finished from None
        self._left = self._steps
        if kind == FACTS and not _on_cuda():
            self._connection.send(Facts(peak_bytes(), None))
            self._wait()
            return
        self._is_recorded = kind == FACTS
        # The memory that the other sides' turns took from this one's cache comes back in a step that does not count.
        self._warm = int(_on_cuda())
        if not self._warm:
            self._begin()


def _on_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available()


def _synchronize() -> None:
    if _on_cuda():
        sys.modules["torch"].cuda.synchronize()


def _empty_cache() -> None:
    """Give unused device memory to the next side."""
    if _on_cuda():
        sys.modules["torch"].cuda.empty_cache()


def _serve(side: Side, connection: Connection, started_s: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the benchmark
    try:
        side.run(_Clock(connection, started_s).step_done)
    except (_Finished, BrokenPipeError):
        return
    except CtxlmError as error:
        connection.send(error)
    except Exception:
        connection.send(RuntimeError(traceback.format_exc()))


class SideProcess:
    """A side as the benchmark sees it."""

    def __init__(self, name: str, side: Side) -> None:
        self.name, self._side = name, side
        self.turns: list[Turn] = []
        self.first_step_s = 0.0
        """From the start of the process to the end of its first step, imports included."""

    def start(self) -> None:
        """Start the process and wait for its first step.

        Raises:
            CtxlmError: of the side, e.g. a setting that it cannot have.
        """
        self._connection, theirs = CONTEXT.Pipe()
        arguments = (self._side, theirs, time.monotonic())
        self._process = CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.first_step_s = self._receive()

    def take_turn(self, steps: int) -> None:
        """Take `steps` steps and remember the turn."""
        self._connection.send((TURN, steps))
        self.turns.append(self._receive())

    def steps_in(self, seconds: float) -> int:
        """Return the number of steps that take about so long; one is taken, which is not remembered."""
        self.take_turn(1)
        return max(1, round(seconds / self.turns.pop().seconds))

    def facts(self) -> Facts:
        """Return what is known after the turns; on CUDA one further step is recorded."""
        self._connection.send((FACTS, 1))
        facts: Facts = self._receive()
        return facts

    def close(self) -> None:
        """End the process."""
        if hasattr(self, "_process"):
            self._connection.close()
            self._process.terminate()
            self._process.join()

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError:
            self._process.join()
            raise ConfigError(
                f"the process of {self.name} ended with status {self._process.exitcode}; if memory ran out, measure "
                "fewer sides (--against) or a smaller training.micro_batch_size"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextmanager
def started(sides: Mapping[str, Side]) -> Iterator[dict[str, SideProcess]]:
    """Start the sides one after another, and end them."""
    processes = {name: SideProcess(name, side) for name, side in sides.items()}
    try:
        for process in processes.values():
            process.start()
        yield processes
    finally:
        for process in processes.values():
            process.close()


def alternate(processes: Mapping[str, SideProcess], rounds: int, least_steps: int = 1) -> None:
    """Give each side a turn, `rounds` times, after a turn of one step that does not count.

    A turn has `least_steps` steps, and more if they take less than SHORTEST_TURN_S.
    """
    sizes = {name: max(least_steps, process.steps_in(SHORTEST_TURN_S)) for name, process in processes.items()}
    for _ in range(rounds):
        for name, process in processes.items():
            process.take_turn(sizes[name])
