"""Where ranks that do not get on stand: each one's stacks as a file, and one file of all that begins with the odd ones.

In: what faulthandler wrote. Out: RUN/attempts/ATTEMPT/stacks-00003.txt and stacks.txt. Needs no torch.
Not here: when a rank is taken to hang (watchdog.py, guard.py).
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ctxlm_ds.atomic import write_text
from ctxlm_ds.process.slurm import join_numbers

ALL_STACKS_NAME = "stacks.txt"
STACKS_GLOB = "stacks-*.txt"
MAIN_THREAD = "MainThread"
COLLECTIVE_FOLDERS = ("torch/distributed/", "deepspeed/comm/", "torch\\distributed")
INNERMOST_FRAMES = 12

_THREAD_LINE = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*\(most recent call first\):", re.MULTILINE)
_NAMED_LINE = re.compile(rf"^Thread {MAIN_THREAD} .*:\n((?:  .*\n?)*)", re.MULTILINE)
_FILE_NAME = re.compile(r"stacks-(\d+)\.txt")


def stacks_name(rank: int) -> str:
    """`3` -> `stacks-00003.txt`."""
    return f"stacks-{rank:05d}.txt"


def open_scratch() -> int:
    """A file in memory for what faulthandler writes: it must be open before anything goes wrong."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("stacks")
    with tempfile.TemporaryFile() as handle:
        return os.dup(handle.fileno())


def read_scratch(handle: int, begin: int = 0) -> str:
    """Its text from byte `begin` on."""
    return os.pread(handle, max(0, os.fstat(handle).st_size - begin), begin).decode(errors="replace")


def name_threads(text: str, names: Mapping[int, str]) -> str:
    """faulthandler's text with each thread's name where `names` knows its identifier."""

    def named(match: re.Match[str]) -> str:
        ident = int(match[1], 16)
        return f"Thread {names.get(ident, 'without a name')} (0x{ident:x}, most recent call first):"

    return _THREAD_LINE.sub(named, text)


def main_frames(text: str) -> tuple[str, ...]:
    """The main thread's frames, innermost first; empty where the rank could not tell."""
    match = _NAMED_LINE.search(text)
    return tuple(line.strip() for line in match[1].splitlines()) if match else ()


def read_stacks(folder: Path) -> dict[int, str]:
    """The text of every rank that left its stacks, by rank."""
    found = {}
    for path in folder.glob(STACKS_GLOB):
        match = _FILE_NAME.fullmatch(path.name)
        try:
            if match:
                found[int(match[1])] = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
    return dict(sorted(found.items()))


def join_stacks(texts: Mapping[int, str], world_size: int) -> str:
    """One text over all ranks: those that stand elsewhere than the others first, as they are the likely culprits.

    Args:
        texts: each rank's own text (a line of facts, then its threads).
        world_size: ranks of the run; those without a text are named before all.
    """
    silent = [rank for rank in range(world_size) if rank not in texts]
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(main_frames(text), []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (_suspicion(group[0]), len(group[1])))
    parts = [_silent_part(silent)] if silent else []
    parts += [_group_part(frames, ranks, texts) for frames, ranks in ordered]
    shown = [ranks[0] for _, ranks in ordered]
    parts += [f"--- every thread of rank {rank}\n{texts[rank].rstrip()}\n" for rank in shown]
    return "\n".join(parts)


def write_joined(folder: Path, world_size: int) -> Path:
    """Join what the ranks left into one file.

    Raises:
        OSError: the disk is full or gone.
    """
    path = folder / ALL_STACKS_NAME
    write_text(path, join_stacks(read_stacks(folder), world_size))
    return path


def likely_culprits(texts: Mapping[int, str], world_size: int) -> list[int]:
    """The ranks that the joined text begins with; empty where all stand at one place."""
    silent = [rank for rank in range(world_size) if rank not in texts]
    if silent:
        return silent
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(main_frames(text), []).append(rank)
    if len(groups) == 1:
        return []
    return min(groups.items(), key=lambda group: (_suspicion(group[0]), len(group[1])))[1]


def describe_ranks(ranks: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` -> `ranks 0-2, 5`; `[3]` -> `rank 3`."""
    return f"rank{'' if len(ranks) == 1 else 's'} {join_numbers(ranks, ', ')}"


def _suspicion(frames: tuple[str, ...]) -> int:
    """0 for a rank that could not answer, 1 for one outside collectives, 2 for one that waits for the others."""
    if not frames:
        return 0
    return 2 if any(name in frame for frame in frames[:INNERMOST_FRAMES] for name in COLLECTIVE_FOLDERS) else 1


def _silent_part(ranks: list[int]) -> str:
    return (
        f"=== {describe_ranks(ranks)} left no stacks: killed, on a node that is gone or cut off, or without the "
        "run directory\n"
    )


def _group_part(frames: tuple[str, ...], ranks: list[int], texts: Mapping[int, str]) -> str:
    stand = "stands" if len(ranks) == 1 else "stand"
    facts = "\n".join(texts[rank].partition("\n")[0] for rank in ranks[:16])
    if not frames:
        return f"=== {describe_ranks(ranks)} could not tell where\n{facts}\n"
    waiting = " (waiting for other ranks)" if _suspicion(frames) == 2 else ""
    lines = "\n".join(f"  {frame}" for frame in frames)
    return f"=== {describe_ranks(ranks)} {stand} here{waiting}, most recent call first:\n{lines}\n{facts}\n"
