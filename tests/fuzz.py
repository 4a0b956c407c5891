"""Seeded damage of files, each case in a process with little memory and a limit of time for each.

A test file declares `prepare(folder) -> case`; `case(seed)` damages something in the folder, reads it, and returns the
name of what came of it, or raises the CtxlmError that refuses it. `run_cases(prepare, folder, seeds)` counts these.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import random
import resource
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ctxlm_ds.errors import CtxlmError

REPOSITORY = Path(__file__).parents[1]
LONGEST_MESSAGE = 20_000
ARENA_MAX = -8  # of mallopt(3)
DEEP = b"[" * 50_000 + b"]" * 50_000
NUMBERS = (0, 1, 9, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 2**31)
INSERTS = (b"\0" * 8, b"\xff" * 4, b"{", b"[", b"\n", b'"', b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"9" * 6000)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 5, 0.5, 1e12, 10**12, 4 * 10**9, 2**31, 2**70, 10**30, -(10**9), float("nan"),
    float("inf"), "", "x", "../../etc/passwd", "os.system", "\ud800", "a\0b", "x" * 5000, [], [[]], ["a"], [1, 2, 3],
    {}, {"a": 1}, {"bin": 3},
)  # fmt: skip
Case = Callable[[int], str]


def run_cases(
    prepare: Callable[[Path], Case], folder: Path, seeds: range, room_bytes: int = 1 << 30, limit_s: int = 20
) -> Counter[str]:
    """Run a case for each seed in a fork of this process, which fails at a traceback, a hang or much memory.

    Args:
        prepare: makes the case.
        folder: where cases write.
        seeds: seeds of the cases.
        room_bytes: memory beyond what the imports and `prepare` take.
        limit_s: seconds for each case.
    """
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_run, args=(theirs, prepare, folder, seeds, room_bytes, limit_s))
    process.start()
    theirs.close()
    try:
        outcomes, failures = ours.recv()
    except EOFError:
        outcomes, failures = Counter[str](), ["it ended without a word"]
    process.join()
    assert process.exitcode == 0 and not failures, f"status {process.exitcode}\n" + "".join(failures)[-5000:]
    assert outcomes.total() == len(seeds)
    return outcomes


def damage(content: bytes, drawn: random.Random, inserts: Sequence[bytes] = INSERTS) -> bytes:
    """Cut, flip, overwrite, insert, remove, repeat or replace some bytes."""
    place, kind = drawn.randint(0, len(content)), drawn.randrange(10)
    if kind == 0:
        return content[:place]
    if kind <= 3 and content:
        flipped = bytearray(content)
        for _ in range(drawn.choice((1, 1, 1, 2, 8, 30))):
            flipped[drawn.randrange(len(flipped))] ^= 1 << drawn.randrange(8)
        return bytes(flipped)
    if kind <= 5:
        # Headers have their numbers at the beginning.
        place = min(len(content), drawn.choice((place, 4 * drawn.randrange(15), 1 + 8 * drawn.randrange(5))))
        number = drawn.choice(NUMBERS).to_bytes(8, "little")[: drawn.choice((1, 4, 8))]
        return content[:place] + number + content[place + len(number) :]
    if kind == 6:
        return content[:place] + drawn.choice((*inserts, drawn.randbytes(8))) + content[place:]
    if kind == 7:
        return content[:place] + content[place + drawn.choice((1, 4, 8, 100, 400)) :]
    if kind == 8:
        return content + content[place : place + 500]
    return drawn.choice((b"", b"\n", bytes(9), bytes(70_000), DEEP, drawn.randbytes(34), drawn.randbytes(len(content))))


def damage_json(content: bytes, drawn: random.Random) -> bytes:
    """Remove or replace one value of a JSON text, or the complete text."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return DEEP
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, below in items:
            places.append((value, key))
            walk(below)

    walk(document)
    if not places or drawn.random() < 0.05:
        return json.dumps(drawn.choice(VALUES)).encode()
    container, key = drawn.choice(places)
    if drawn.random() < 0.15:
        del container[key]
    else:
        container[key] = drawn.choice(VALUES)
    return json.dumps(document).encode()


def _too_long(*_: object) -> None:
    raise TimeoutError("longer than the limit of a case")


def _run(
    answer: Connection, prepare: Callable[[Path], Case], folder: Path, seeds: range, room_bytes: int, limit_s: int
) -> None:
    """Run the cases; send what came of them, and each failure with its seed."""
    # Arenas of threads would take address space in proportion to the cores.
    ctypes.CDLL(None).mallopt(ARENA_MAX, 1)
    case = prepare(folder)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + room_bytes,) * 2)
    signal.signal(signal.SIGALRM, _too_long)
    outcomes, failures = Counter[str](), []
    for seed in seeds:
        signal.alarm(limit_s)
        try:
            outcomes[case(seed)] += 1
        except CtxlmError as error:
            assert len(str(error)) <= LONGEST_MESSAGE, f"seed {seed}: a message of {len(str(error))} characters"
            outcomes["refused"] += 1
        except BaseException:
            failures.append(f"seed {seed}\n{traceback.format_exc()[-2000:]}\n")
            outcomes["failed"] += 1
        finally:
            signal.alarm(0)
    answer.send((outcomes, failures))
