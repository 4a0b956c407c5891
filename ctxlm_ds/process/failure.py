"""The end of a rank with an error: one clear message, an exit status, and RUN/attempts/ATTEMPT/rank-00003.json.

A watchdog ends a run that makes no progress: every rank leaves its threads' stacks, one file joins them, and the exit
status is 4. A thread of each rank counts the time. While C code holds the interpreter that thread cannot run: then
faulthandler prints the stacks on stderr and ends the rank with status 1.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from ctxlm_ds import errors
from ctxlm_ds.atomic import read_object, write_text
from ctxlm_ds.console import format_duration, logger
from ctxlm_ds.process.launch import RankInfo
from ctxlm_ds.process.run_files import say, update_status
from ctxlm_ds.process.run_history import attempt_folder
from ctxlm_ds.process.signals import StopSignal
from ctxlm_ds.process.slurm import join_numbers
from ctxlm_ds.recipe.schema import WatchdogConfig

T = TypeVar("T")

EXIT_INTERRUPTED = 130
NODE = -1
RANK_0_WAIT_S, POLL_S = 10.0, 0.5
TEARDOWN_S, INTERRUPTED_TEARDOWN_S = 60.0, 3.0
SHOWN_CHARACTERS = 300
DISK_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
LOST_TYPES = ("ConnectionResetError", "BrokenPipeError")
LOST_MESSAGES = re.compile(  # of gloo, NCCL and torch's store about a peer that has ended
    r"connection (was )?(closed|reset) by|connection reset|broken pipe|socket closed|got 0 bytes"
    r"|timed out waiting \d+\s*ms for|application timeout caused pair closure|wait timeout"
    r"|waiting for clients|client socket has timed out|connect timeout|no route to host"
    r"|ncclremoteerror|remote process exited|communicator was aborted|collective operation timeout",
    re.IGNORECASE,
)
OWN_MESSAGES = re.compile(r"address already in use|failed to (bind|listen)", re.IGNORECASE)
_SOURCE_PLACE = re.compile(r"\[\S+:\d+\] ")
SHORTEST_POLL_S, LONGEST_POLL_S, POLLS_PER_LIMIT = 0.05, 5.0, 20
SUSPICION = 0.25  # share of its limit after which a rank follows another that has reached its
GRACE_S, JOINING_S = 15.0, 5.0  # how long a rank waits for the others' stacks, and then for the rank that joins them
EVIDENCE_S = 30.0  # how long all of this may take, because the run directory may be what hangs
HELD_S, FOREVER_S = 60.0, 1e8  # time beyond the limit after which faulthandler ends a rank
DUMP_SIGNAL = signal.SIGUSR2
ALL_STACKS_NAME = "stacks.txt"
MAIN_THREAD = "MainThread"
COLLECTIVE_FOLDERS = ("torch/distributed/", "deepspeed/comm/")
INNERMOST_FRAMES = 12

_MAIN_FRAMES = re.compile(rf"^Thread {MAIN_THREAD}, .*:\n((?:  .*\n?)*)", re.MULTILINE)


@dataclass(frozen=True)
class FailureRecord:
    """The end of one rank, by what it left or by what its launcher says."""

    time_unix_s: float
    rank: int  # NODE if the node itself failed
    host: str
    exit_status: int
    error: str  # the exception's type
    message: str
    traceback: str | None = None  # None for a user's mistake
    consequence: bool = False  # True if another rank's end is the reason for this one
    signal: int | None = None  # that ended it

    def describe(self) -> str:
        """Describe rank, host and error in one line, a user's mistake by all its lines."""
        if self.rank == NODE:
            return f"node {self.host} failed"
        what = ": ".join(str(part).strip() for part in (self.error, self.message) if part)
        text = f"rank {self.rank} on {self.host}{' ' if self.signal else ': '}{what}"
        return shortened(text) if self.traceback else text


def shortened(text: str) -> str:
    """Shorten an error's message to one line, without the C++ source line that torch's begin with."""
    line = _SOURCE_PLACE.sub("", " ".join(text.split()))
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…"


def read_failures(folder: Path) -> list[FailureRecord]:
    """Read the intact records of one attempt, the likely reason first: causes before consequences, each by time."""
    records = filter(None, map(read_record, sorted(folder.glob("rank-*.json"))))
    return sorted(records, key=lambda record: (record.consequence, record.time_unix_s))


def read_record(path: Path) -> FailureRecord | None:
    """Read one record; None if it is missing or damaged."""
    values, known = read_object(path) or {}, {field.name for field in fields(FailureRecord)}
    with contextlib.suppress(ValueError, TypeError):
        record = FailureRecord(**{name: value for name, value in values.items() if name in known})
        return record if float(record.time_unix_s) >= 0 else None
    return None


def write_record(folder: Path, record: FailureRecord) -> None:
    """Write a record, and the run's status if it is rank 0's or of a hang, unless the disk is full or missing."""
    with contextlib.suppress(OSError):
        write_text(folder / f"rank-{record.rank:05d}.json", json.dumps(asdict(record), indent=1) + "\n")
        # The refusal of a second process is no failure of the run.
        if (record.rank == 0 or record.exit_status == errors.EXIT_HANG) and record.error != "RunLockedError":
            why = read_failures(folder)[0].describe()
            state = "stopped" if record.exit_status == EXIT_INTERRUPTED else "failed"
            update_status(folder.parent.parent, state=state, why=why, left_s=None, last_failure=why)


class FailureReport:
    """Reports the error that ends this rank; `ranks` and `run_dir` are set as soon as they are known."""

    def __init__(self, stop_signal: StopSignal) -> None:
        self.ranks: RankInfo | None = None
        self.run_dir: Path | None = None
        self._stop_signal = stop_signal
        self._started_unix_s = time.time()

    @property
    def rank(self) -> int:
        """This process's rank, from the launcher's variables while `ranks` is not set."""
        text = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
        return self.ranks.rank if self.ranks is not None else int(text) if text.isdigit() else 0

    def end(self, error: BaseException) -> int:
        """Report an exception that ends the process, and return the exit status."""
        self._stop_signal.starting = False
        stopping = self._stop_signal.requested
        # Process groups may wait for peers that have ended. The file stays open: the timer writes there from C.
        nowhere: Any = open(os.devnull, "w")  # noqa: SIM115
        limit_s = INTERRUPTED_TEARDOWN_S if isinstance(error, KeyboardInterrupt) else TEARDOWN_S
        faulthandler.dump_traceback_later(limit_s, exit=True, file=nowhere)
        lines = None if is_users(error) else "".join(traceback.format_exception(error))
        record = FailureRecord(
            round(time.time(), 6), self.rank, socket.gethostname(), exit_status(error), type(error).__name__,
            _message(error), lines, is_consequence(error),
        )  # fmt: skip
        # A start that failed must not make a run directory.
        folder = attempt_folder(self.run_dir) if self.run_dir is not None and self.run_dir.is_dir() else None
        if is_users(error) and record.rank != 0 and self._rank_0_says_so(record, folder):
            return record.exit_status
        # A launcher that asks to stop from here on does so because of this error.
        self._stop_signal.requested = True
        if folder is not None:
            write_record(folder, record)
        if not (stopping and record.consequence):
            self._say(record, error)
        return record.exit_status

    def _rank_0_says_so(self, record: FailureRecord, folder: Path | None) -> bool:
        """Return whether rank 0 ends with the same message: by its record, or because the launcher stops this rank."""
        stopped_before, deadline_s = self._stop_signal.requested, time.monotonic() + RANK_0_WAIT_S
        while time.monotonic() < deadline_s:
            if self._stop_signal.requested and not stopped_before:
                return True
            other = None if folder is None else read_record(folder / "rank-00000.json")
            if other is not None and other.time_unix_s >= self._started_unix_s - RANK_0_WAIT_S:
                return (other.error, other.message) == (record.error, record.message)
            time.sleep(min(POLL_S, RANK_0_WAIT_S / 10))
        return False

    def _say(self, record: FailureRecord, error: BaseException) -> None:
        if is_users(error):
            logger.error("error: %s", record.message)
            return
        lines = (record.traceback or record.message).rstrip().splitlines()
        if isinstance(error, KeyboardInterrupt):
            if record.rank != 0 or self._stop_signal.name not in (None, "SIGINT"):
                return
            lines = ["interrupted"]
        elif record.consequence:
            how = "stops with another rank" if errors.is_from_another_rank(error) else "lost the others"
            lines = [f"{how}: {shortened(f'{record.error}: {record.message}')}"]
        alone = self.ranks is None or self.ranks.world_size == 1 or isinstance(error, KeyboardInterrupt)
        sys.stdout.flush()
        sys.stderr.flush()
        say("\n".join(line if alone else f"[rank {record.rank}] {line}" for line in lines))


def is_users(error: BaseException) -> bool:
    """Return whether the message alone says what to fix."""
    return isinstance(error, errors.CtxlmError) or (isinstance(error, OSError) and error.errno in DISK_ERRORS)


def is_consequence(error: BaseException | None) -> bool:
    """Return whether another rank's end is the reason: a lost connection, or an exception that was sent here."""
    if error is None or isinstance(error, errors.CtxlmError):
        return False
    is_lost = type(error).__name__ in LOST_TYPES or LOST_MESSAGES.search(str(error))
    lost = bool(is_lost) and not OWN_MESSAGES.search(str(error))
    return lost or errors.is_from_another_rank(error) or is_consequence(error.__cause__)


def exit_status(error: BaseException) -> int:
    """Return the process's exit status for an exception (errors.py)."""
    if isinstance(error, (errors.TrainingError, KeyboardInterrupt)):
        return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else errors.EXIT_TRAINING_ERROR
    return errors.EXIT_USER_ERROR if is_users(error) else errors.EXIT_UNEXPECTED


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and is_users(error):
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where} (on {socket.gethostname()})"
    return "stopped by Ctrl-C" if isinstance(error, KeyboardInterrupt) else str(error)


class Watchdog:
    """Watches this rank inside a `with` statement; a limit of null is switched off."""

    def __init__(self, config: WatchdogConfig, run_dir: Path, ranks: RankInfo) -> None:
        step, save = config.step_minutes, config.save_minutes
        minutes = {"start": config.start_minutes, "training": step, "evaluation": step, "saving": save, "end": save}
        self._limits_s = {name: math.inf if value is None else value * 60 for name, value in minutes.items()}
        self._poll_s = min(LONGEST_POLL_S, max(SHORTEST_POLL_S, min(self._limits_s.values()) / POLLS_PER_LIMIT))
        self._folder = attempt_folder(run_dir)
        self.ranks = ranks
        self.writing_age_s: Callable[[], float | None] = lambda: None
        """Returns the seconds since an incomplete checkpoint was begun; `save_minutes` holds for these as well."""
        self._phase = "start"
        self._step: int | None = None
        self._beats = 0
        self._began_unix_s = time.time()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        faulthandler.enable(file=2)
        faulthandler.register(DUMP_SIGNAL, file=2)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(LONGEST_POLL_S)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(DUMP_SIGNAL)

    def clear_old_evidence(self) -> None:
        """Remove the evidence of an earlier start in the same folder; only under the run's lock."""
        for path in [*self._folder.glob("rank-*.json"), *self._folder.glob("stacks*.txt")]:
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < self._began_unix_s:
                    path.unlink()

    def beat(self, phase: str | None = None, step: int | None = None) -> None:
        """Note progress, in this phase or in the one before."""
        self._phase = self._phase if phase is None else phase
        self._step = self._step if step is None else step
        self._beats += 1

    def enter(self, phase: str) -> None:
        """Note the phase that begins: training, evaluation or saving."""
        # Until the first step is done a run is still starting, also in the evaluation before it.
        self.beat("start" if self._phase == "start" and phase in ("training", "evaluation") else phase)

    def _watch(self) -> None:
        seen, still_s, written_s = -1, 0.0, 0.0
        while True:
            limit_s, begin_s = self._limits_s[self._phase], time.monotonic()
            faulthandler.dump_traceback_later(min(limit_s, FOREVER_S) + HELD_S, exit=True, file=2)
            if self._over.wait(self._poll_s):
                return
            # The time of a suspended job or machine does not count.
            passed_s = min(time.monotonic() - begin_s, 3 * self._poll_s)
            still_s = 0.0 if self._beats != seen else still_s + passed_s
            seen = self._beats
            written_s = min(self.writing_age_s() or 0.0, written_s + passed_s)
            if still_s >= limit_s or (still_s >= SUSPICION * limit_s and self._others_hang()):
                self._end(f"no progress for {format_duration(still_s)}")
            if written_s >= self._limits_s["saving"]:
                self._end(f"a checkpoint has been on its way to the disk for {format_duration(written_s)}")

    def _others_hang(self) -> bool:
        """Return whether another rank has left its stacks: its limit may have been a shorter one."""
        with contextlib.suppress(OSError):
            others = [path for rank, path in stacks_files(self._folder).items() if rank != self.ranks.rank]
            return any(path.stat().st_mtime >= self._began_unix_s for path in others)
        return False

    def _end(self, why: str) -> None:
        """Leave the evidence, as far as the run directory allows, and end this process."""
        evidence = threading.Thread(target=self._leave_evidence, args=(why,), daemon=True)
        evidence.start()
        evidence.join(EVIDENCE_S)
        os._exit(errors.EXIT_HANG)

    def _leave_evidence(self, why: str) -> None:
        ranks, folder, host = self.ranks, self._folder, socket.gethostname()
        what = f"{self._phase}{'' if self._step is None else f', after step {self._step}'}, {why}"
        facts = f"rank {ranks.rank} of {ranks.world_size} on {host} (process {os.getpid()}): {what}"
        deadline_s = time.monotonic() + GRACE_S
        try:
            write_text(folder / f"stacks-{ranks.rank:05d}.txt", f"{facts}\n\n{all_stacks()}")
        except OSError as error:
            say(f"[rank {ranks.rank}] the stacks could not be written to {folder}: {error}")
            deadline_s = 0.0
        # Every rank lists the folder, and one reads the files: all ranks do this at the same time.
        while len(found := stacks_files(folder)) < ranks.world_size and time.monotonic() < deadline_s:
            time.sleep(self._poll_s)
        if ranks.rank == min(found, default=ranks.rank):
            message = what + conclude(folder, ranks.world_size)
            record = FailureRecord(round(time.time(), 3), ranks.rank, host, errors.EXIT_HANG, "Hang", message)
            write_record(folder, record)
            tag = f"{time.strftime('%H:%M:%S')} {f'[rank {ranks.rank}] ' if ranks.rank else ''}"
            say(f"{tag}hang: {message}; the run ends with status {errors.EXIT_HANG}")
        # The first rank to end may make the launcher kill the others.
        while not (folder / ALL_STACKS_NAME).exists() and time.monotonic() < deadline_s + JOINING_S:
            time.sleep(self._poll_s)


@dataclass
class Watched(Generic[T]):
    """Batches, each of which counts as progress, as often as they are read."""

    batches: Iterable[T]
    watchdog: Watchdog

    def __iter__(self) -> Iterator[T]:
        for batch in self.batches:
            self.watchdog.beat()
            yield batch


def all_stacks() -> str:
    """Return the frames of every thread of this process, innermost first, by the thread's name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        # Without source lines, because reading them may hang as well.
        calls = [(at.f_code, line) for at, line in traceback.walk_stack(frame)]
        lines = [f'  File "{code.co_filename}", line {line} in {code.co_name}\n' for code, line in calls]
        parts.append(f"Thread {names.get(ident, ident)}, most recent call first:\n{''.join(lines)}")
    return "\n".join(parts)


def stacks_files(folder: Path) -> dict[int, Path]:
    """Return the files of the ranks that left their stacks, from the names in the folder alone."""
    return {int(path.stem[len("stacks-") :]): path for path in sorted(folder.glob("stacks-[0-9]*.txt"))}


def conclude(folder: Path, world_size: int) -> str:
    """Join the ranks' stacks into one file; return which ranks to look at first, and where the file is."""
    texts = {rank: path.read_text(encoding="utf-8", errors="replace") for rank, path in stacks_files(folder).items()}
    joined, culprits = join_stacks(texts, world_size)
    first = f"; look at {describe_ranks(culprits)} first" if culprits else ""
    try:
        write_text(folder / ALL_STACKS_NAME, joined)
        return f"{first}; all ranks' stacks are in {folder / ALL_STACKS_NAME}"
    except OSError as error:
        return f"{first}; the stacks could not be joined: {error}"


def join_stacks(texts: Mapping[int, str], world_size: int) -> tuple[str, list[int]]:
    """Join the texts of all ranks into one, and return the ranks that it begins with: the likely culprits.

    Ranks without a text come first, then those outside of collectives; none is accused if all are in the same place.
    """

    def waits(frames: Sequence[str]) -> bool:  # inside a collective, for the others
        return any(name in frame for frame in frames[:INNERMOST_FRAMES] for name in COLLECTIVE_FOLDERS)

    by_frames: dict[tuple[str, ...], list[int]] = {}
    for rank, text in texts.items():
        match = _MAIN_FRAMES.search(text)
        by_frames.setdefault(tuple(match[1].splitlines()) if match else (), []).append(rank)
    groups = sorted(by_frames.items(), key=lambda group: (waits(group[0]), len(group[1])))
    silent = [rank for rank in range(world_size) if rank not in texts]
    why = "stopped, killed, held by C code, on a lost node, or without the run directory"
    parts = [f"=== {describe_ranks(silent)} left no stacks: {why}\n"] if silent else []
    for frames, ranks in groups:
        are = f"{'is' if len(ranks) == 1 else 'are'} here{' (waiting for other ranks)' if waits(frames) else ''}"
        facts = "\n".join(texts[rank].partition("\n")[0] for rank in ranks[:16])
        calls = "".join(f"{frame}\n" for frame in frames)
        parts.append(f"=== {describe_ranks(ranks)} {are}, most recent call first:\n{calls}{facts}\n")
    parts += [f"--- every thread of rank {ranks[0]}\n{texts[ranks[0]].rstrip()}\n" for _, ranks in groups]
    return "\n".join(parts), silent or (groups[0][1] if len(groups) > 1 else [])


def describe_ranks(ranks: Sequence[int]) -> str:
    """Describe `[0, 1, 2, 5]` as `ranks 0-2, 5` and `[3]` as `rank 3`."""
    return f"rank{'' if len(ranks) == 1 else 's'} {join_numbers(ranks, ', ')}"
