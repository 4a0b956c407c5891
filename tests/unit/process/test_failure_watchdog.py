"""The watchdog on real processes (forks of this one) that hang, are paused or are asked for their stacks."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.errors import EXIT_HANG
from ctxlm_ds.process.failure import (
    DUMP_SIGNAL,
    MAIN_THREAD,
    FailureRecord,
    Watchdog,
    all_stacks,
    conclude,
    join_stacks,
    read_failures,
    stacks_files,
)
from ctxlm_ds.process.launch import RankInfo
from ctxlm_ds.recipe.schema import WatchdogConfig
from tests.integration.forked import Forked
from tests.unit.process import watched_rank

pytestmark = pytest.mark.dist
SHORT = {"start_minutes": 0.02, "step_minutes": 0.02, "save_minutes": 0.1}
LONGER = {"start_minutes": 1, "step_minutes": 0.03, "save_minutes": 0.5}
NONE: dict[str, float | None] = dict.fromkeys(SHORT)
PATIENCE_S = 120
Scenario = tuple[Any, ...]
"""Limits of the watchdog in minutes, then what each rank does."""


@dataclass
class Run:
    """The ranks of one scenario."""

    folder: Path
    ranks: list[Forked]

    @property
    def evidence(self) -> Path:
        return self.folder / "run" / "attempts" / "try"

    def text(self, name: str = "stacks.txt") -> str:
        return (self.evidence / name).read_text()

    def record(self) -> FailureRecord:
        (record,) = read_failures(self.evidence)
        return record

    def wait_until_ready(self, rank: int = 0) -> None:
        until((self.folder / f"ready-{rank}").exists)

    def end(self, rank: int = 0) -> tuple[int, str]:
        """Exit status and stderr."""
        return self.ranks[rank].wait(PATIENCE_S), self.said(rank)

    def said(self, rank: int = 0) -> str:
        return (self.folder / f"stderr-{rank}").read_text()


def start(folder: Path, limits: Any, *whats: str) -> Run:
    ranks = []
    for rank, what in enumerate(whats):
        words = [watched_rank.__file__, str(folder / "run"), str(rank), str(len(whats)), json.dumps(limits), what]
        environ = {**os.environ, "READY": str(folder / f"ready-{rank}"), "CTXLM_ATTEMPT": "try"}
        with open(os.devnull, "w") as nothing, open(folder / f"stderr-{rank}", "w") as errors:
            ranks.append(Forked(words, environ, folder, nothing.fileno(), errors.fileno(), 1))
    return Run(folder, ranks)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


BEGUN = {**SHORT, "start_minutes": 1}
SCENARIOS: dict[str, Scenario] = {
    "elsewhere": (BEGUN, "hang", "hang_elsewhere", "hang"),
    "at start": (SHORT, "hang_at_start"),
    "limits": (LONGER, "go_on"),
    "no limits": (NONE, "go_on"),
    "no folder": (SHORT, "hang"),
    "paused": (BEGUN, "pause"),
    "writes": ({**LONGER, "save_minutes": 0.02}, "write"),
    "asked": ({**NONE, "save_minutes": 0.02}, "wait"),
    "held": (BEGUN, "hang", "hold"),
    "held alone": (BEGUN, "hold"),
    "crash": (NONE, "crash"),
}
WITHOUT_FOLDER = ("at start", "writes", "limits", "no limits", "no folder", "asked")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp("watchdog")
        if name not in WITHOUT_FOLDER:
            (folder / "run").mkdir()
        if name == "no folder":
            (folder / "run").write_text("a file")
        return folder

    started = {name: start(folder_of(name), *scenario) for name, scenario in SCENARIOS.items()}
    try:
        # It is stopped here, or it would be over when its test comes.
        started["paused"].wait_until_ready()
        paused = started["paused"].ranks[0].pid
        os.kill(paused, signal.SIGSTOP)
        time.sleep(4.0)  # more than three times the limit
        os.kill(paused, signal.SIGCONT)
        yield started
    finally:
        for process in (process for run in started.values() for process in run.ranks):
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()


def test_the_rank_that_stands_elsewhere_is_named_first(runs: dict[str, Run]) -> None:
    run = runs["elsewhere"]
    ended = [run.end(rank) for rank in range(3)]
    assert [status for status, _ in ended] == [EXIT_HANG] * 3
    assert run.text().startswith("=== rank 1 is here")
    assert "in stand_elsewhere" in run.text().partition("=== ranks 0, 2 are here")[0]
    assert "training, after step 1, no progress for" in run.text()
    assert {path.name for path in run.evidence.glob("stacks-*")} == {f"stacks-0000{rank}.txt" for rank in range(3)}
    assert (run.record().error, run.record().exit_status) == ("Hang", EXIT_HANG)
    assert "look at rank 1 first" in run.record().message
    assert "look at rank 1 first" in "".join(said for _, said in ended)


def test_a_start_is_watched_and_makes_the_folder(runs: dict[str, Run]) -> None:
    status, said = runs["at start"].end()
    assert status == EXIT_HANG and "hang: start, no progress" in said
    assert "in hang_at_start" in runs["at start"].text()


@pytest.mark.parametrize("name", ["limits", "no limits"])
def test_what_gets_on_is_left_alone(name: str, runs: dict[str, Run]) -> None:
    assert runs[name].end() == (0, "")
    assert not (runs[name].folder / "run").exists()


def test_a_folder_that_cannot_be_written_does_not_keep_the_rank_alive(runs: dict[str, Run]) -> None:
    status, said = runs["no folder"].end()
    assert status == EXIT_HANG and "could not be written" in said


def test_a_stopped_and_continued_job_is_no_hang(runs: dict[str, Run]) -> None:
    assert runs["paused"].end() == (0, "")


def test_stacks_can_be_asked_for(runs: dict[str, Run]) -> None:
    run = runs["asked"]
    run.wait_until_ready()
    os.kill(run.ranks[0].pid, DUMP_SIGNAL)
    until(lambda: "in wait" in run.said())
    assert run.ranks[0].poll() is None


def test_a_rank_held_by_c_code_is_named_by_the_others_and_ends_with_its_stack(runs: dict[str, Run]) -> None:
    run = runs["held"]
    assert run.end(0)[0] == EXIT_HANG
    assert run.text().startswith("=== rank 1 left no stacks") and "look at rank 1 first" in run.record().message
    for name, rank in (("held", 1), ("held alone", 0)):
        status, said = runs[name].end(rank)
        assert status == 1 and "in hold" in said


def test_a_crash_in_c_code_shows_its_stack(runs: dict[str, Run]) -> None:
    status, said = runs["crash"].end()
    assert (
        status == -signal.SIGSEGV and said.startswith("Fatal Python error: Segmentation fault") and "in crash" in said
    )


def test_a_checkpoint_that_is_not_written_is_a_hang(runs: dict[str, Run]) -> None:
    status, said = runs["writes"].end()
    assert status == EXIT_HANG and "a checkpoint has been on its way to the disk for 0:0" in said


WAITING = 'File "/x/torch/distributed/distributed_c10d.py", line 2 in all_reduce'


def text(rank: int, *frames: str) -> str:
    lines = "\n".join(f"  {frame}" for frame in frames)
    threads = f"Thread watchdog, …:\n  File a\n\nThread {MAIN_THREAD}, …:\n{lines}\n"
    return f"rank {rank} of 4: training\n\n{threads}"


def test_stacks_of_this_process() -> None:
    release, begun = threading.Event(), threading.Event()

    def wait_here() -> None:
        begun.set()
        release.wait()

    other = threading.Thread(target=wait_here, name="helper")
    other.start()
    begun.wait()
    text = all_stacks()
    release.set()
    other.join()
    helper, main = (text.partition(f"Thread {name}, ")[2].partition("\nThread ")[0] for name in ("helper", MAIN_THREAD))
    assert "in wait_here" in helper and "wait_here" not in main
    assert "test_stacks_of_this_process" in main


def test_the_one_elsewhere_comes_first() -> None:
    texts = {rank: text(rank, WAITING, "File b, line 1 in step") for rank in range(4)}
    texts[2] = text(2, "File c, line 9 in read", "File b, line 1 in step")
    joined, culprits = join_stacks(texts, 4)
    assert joined.startswith("=== rank 2 is here, most recent call first:\n  File c, line 9 in read")
    assert "=== ranks 0-1, 3 are here (waiting for other ranks)" in joined
    assert culprits == [2]


@pytest.mark.parametrize(
    ("frames", "size", "culprits"),
    [
        ({0: WAITING, 1: "File c, line 9 in read"}, 2, [1]),
        ({0: WAITING, 1: "File c", 2: "File c"}, 3, [1, 2]),  # the majority reads, and one waits for them
        ({0: WAITING, 3: "File c"}, 4, [1, 2]),  # the silent ones come before all
        (dict.fromkeys(range(3), WAITING), 3, []),
    ],
)
def test_whom_stacks_accuse(frames: dict[int, str], size: int, culprits: list[int]) -> None:
    assert join_stacks({rank: text(rank, frame) for rank, frame in frames.items()}, size)[1] == culprits


def test_files(tmp_path: Path) -> None:
    for rank in (11, 0):
        (tmp_path / f"stacks-{rank:05d}.txt").write_text(text(rank, "File c"))
    (tmp_path / "stacks-x.txt").write_text("not a rank's")
    assert list(stacks_files(tmp_path)) == [0, 11]
    assert stacks_files(tmp_path / "missing") == {}
    assert conclude(tmp_path, 12) == f"; look at ranks 1-10 first; all ranks' stacks are in {tmp_path / 'stacks.txt'}"
    assert (tmp_path / "stacks.txt").read_text().startswith("=== ranks 1-10 left no stacks")


def test_evidence_of_earlier_starts_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXLM_ATTEMPT", "try")
    folder = tmp_path / "attempts" / "try"
    folder.mkdir(parents=True)
    for name in ("rank-00000.json", "stacks-00000.txt", "stacks.txt", "output.log"):
        (folder / name).touch()
        os.utime(folder / name, (1000, 1000))
    watchdog = Watchdog(WatchdogConfig(), tmp_path, RankInfo(0, 2, 0, 2, "127.0.0.1", 1, "environment", 0))
    time.sleep(0.05)
    (folder / "rank-00001.json").touch()
    watchdog.clear_old_evidence()
    assert sorted(path.name for path in folder.iterdir()) == ["output.log", "rank-00001.json"]
