"""The watchdog on real processes that hang, are paused or are asked for their stacks (no torch: they start fast)."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxlm_ds.errors import EXIT_HANG
from ctxlm_ds.process.watchdog import (
    DUMP_SIGNAL,
    MAIN_THREAD,
    all_stacks,
    conclude,
    describe_ranks,
    join_stacks,
    stacks_files,
)
from tests.unit.process.watched_runs import LONGER, NONE, SHORT, Run, Scenario, running, until

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
    "one stopped": ({**BEGUN, "step_minutes": 0.1}, "wait", "wait"),
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

    with running(SCENARIOS, folder_of) as started:
        # It is stopped here, or it would be over when its test comes.
        started["paused"].wait_until_ready()
        paused = started["paused"].ranks[0]
        paused.send_signal(signal.SIGSTOP)
        started["one stopped"].wait_until_ready(1)
        started["one stopped"].ranks[1].send_signal(signal.SIGSTOP)
        time.sleep(4.0)  # more than three times the limit
        paused.send_signal(signal.SIGCONT)
        yield started


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
    run.ranks[0].send_signal(DUMP_SIGNAL)
    assert run.ranks[0].stderr is not None
    until(lambda: "in wait" in run.ranks[0].stderr.readline())  # type: ignore[union-attr]
    assert run.ranks[0].poll() is None


def test_a_rank_held_by_c_code_is_named_by_the_others_and_ends_with_its_stack(runs: dict[str, Run]) -> None:
    run = runs["held"]
    assert run.end(0)[0] == EXIT_HANG
    assert run.text().startswith("=== rank 1 left no stacks") and "look at rank 1 first" in run.record().message
    for name, rank in (("held", 1), ("held alone", 0)):
        status, said = runs[name].end(rank)
        assert status == 1 and "in hold" in said


def test_a_stopped_rank_is_named_by_the_others(runs: dict[str, Run]) -> None:
    run = runs["one stopped"]
    assert run.end(0)[0] == EXIT_HANG
    assert run.text().startswith("=== rank 1 left no stacks")


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


def test_of_two_the_one_outside_collectives_comes_first() -> None:
    texts = {0: text(0, WAITING), 1: text(1, "File c, line 9 in read")}
    assert join_stacks(texts, 2)[1] == [1]
    # The majority reads, and one waits for them.
    texts = {0: text(0, WAITING), 1: text(1, "File c"), 2: text(2, "File c")}
    assert join_stacks(texts, 3)[1] == [1, 2]


def test_silent_ranks_come_before_all() -> None:
    texts = {0: text(0, WAITING), 3: text(3, "File c")}
    assert join_stacks(texts, 4)[0].startswith("=== ranks 1-2 left no stacks")
    assert join_stacks(texts, 4)[1] == [1, 2]


def test_all_at_one_place_accuse_nobody() -> None:
    texts = {rank: text(rank, WAITING) for rank in range(3)}
    assert join_stacks(texts, 3)[1] == []


def test_files(tmp_path: Path) -> None:
    for rank in (11, 0):
        (tmp_path / f"stacks-{rank:05d}.txt").write_text(text(rank, "File c"))
    (tmp_path / "stacks-x.txt").write_text("not a rank's")
    assert list(stacks_files(tmp_path)) == [0, 11]
    assert stacks_files(tmp_path / "missing") == {}
    assert conclude(tmp_path, 12) == f"; look at ranks 1-10 first; all ranks' stacks are in {tmp_path / 'stacks.txt'}"
    assert (tmp_path / "stacks.txt").read_text().startswith("=== ranks 1-10 left no stacks")


def test_describe_ranks() -> None:
    assert describe_ranks([3]) == "rank 3"
    assert describe_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
