"""The watchdog and its guard on real processes that hang, are stopped, crash or are killed (no torch: they start fast).

All are started at once, because most of them only wait; each test then looks at its own.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.errors import EXIT_HANG
from ctxlm_ds.process.guard import DUMP_SIGNAL
from ctxlm_ds.process.launch import RankInfo
from ctxlm_ds.process.run_history import FailureRecord, read_failures
from ctxlm_ds.process.watchdog import Watchdog
from ctxlm_ds.recipe.schema import WatchdogConfig

RANK = Path(__file__).parent / "watched_rank.py"
SHORT = {"start_minutes": 0.02, "step_minutes": 0.02, "save_minutes": 0.1}
LONGER = {"start_minutes": 1, "step_minutes": 0.03, "save_minutes": 0.5}
NONE: dict[str, float | None] = dict.fromkeys(SHORT)
PATIENCE_S = 120


@dataclass
class Run:
    """The ranks of one scenario."""

    folder: Path
    ranks: list[subprocess.Popen[str]]

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
        """Exit status and stderr, whose other end the guard has too: it is gone as well."""
        said = self.ranks[rank].communicate(timeout=PATIENCE_S)[1]
        return self.ranks[rank].returncode, said


def start(folder: Path, limits: Any, *whats: str) -> Run:
    ranks = []
    for rank, what in enumerate(whats):
        words = [sys.executable, str(RANK), str(folder / "run"), str(rank), str(len(whats)), json.dumps(limits), what]
        environ = {**os.environ, "READY": str(folder / f"ready-{rank}"), "CTXLM_ATTEMPT": "try"}
        ranks.append(subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environ))
    return Run(folder, ranks)


SCENARIOS: dict[str, tuple[Any, ...]] = {
    "elsewhere": ({**SHORT, "start_minutes": 0.3}, "hang", "hang_elsewhere", "hang"),
    "at start": (SHORT, "hang_at_start"),
    "limits": (LONGER, "go_on"),
    "no limits": (NONE, "go_on"),
    "no folder": (SHORT, "hang"),
    "paused": (SHORT, "pause"),
    "holds": (SHORT, "hold"),
    "one stopped": ({**SHORT, "start_minutes": 0.1, "step_minutes": 0.1}, "wait", "wait"),
    "rank 0 stopped": ({**SHORT, "start_minutes": 0.1, "step_minutes": 0.1}, "wait", "wait"),
    "compiles": (NONE, "compile"),
    "killed": (NONE, "wait", "wait"),
    "crash": (SHORT, "crash"),
    "writes": ({**LONGER, "save_minutes": 0.02}, "write"),
    "asked": ({**NONE, "save_minutes": 0.02}, "wait"),
}
WITHOUT_FOLDER = ("at start", "writes", "limits", "no limits", "no folder", "asked")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    started = {}
    for name, scenario in SCENARIOS.items():
        folder = tmp_path_factory.mktemp("watchdog")
        if name not in WITHOUT_FOLDER:
            (folder / "run").mkdir()
        if name == "no folder":
            (folder / "run").write_text("a file")
        started[name] = start(folder, *scenario)
    # These are stopped here, or they would be over when their test comes.
    started["paused"].wait_until_ready()
    family = [started["paused"].ranks[0].pid, *children(started["paused"].ranks[0].pid)]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    started["one stopped"].wait_until_ready(1)
    started["one stopped"].ranks[1].send_signal(signal.SIGSTOP)
    started["rank 0 stopped"].wait_until_ready(0)
    started["rank 0 stopped"].ranks[0].send_signal(signal.SIGSTOP)
    time.sleep(4.0)  # more than three times the limit
    for pid in family:
        os.kill(pid, signal.SIGCONT)
    assert len(family) == 2
    yield started
    for run in started.values():
        for process in run.ranks:
            process.kill()
            process.communicate()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


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


def test_a_rank_that_holds_the_interpreter_is_ended_by_its_guard(runs: dict[str, Run]) -> None:
    status, said = runs["holds"].end()
    assert status == -signal.SIGKILL and "killed by its guard" in said
    assert "in hold" in runs["holds"].text()
    assert (runs["holds"].record().error, runs["holds"].record().exit_status) == ("Hang", EXIT_HANG)


def test_one_stopped_rank_of_two(runs: dict[str, Run]) -> None:
    """The other collects what the guard can tell of it; then the guard ends it, stopped as it is."""
    run = runs["one stopped"]
    assert [run.end(rank)[0] for rank in range(2)] == [EXIT_HANG, -signal.SIGKILL]
    assert run.text().startswith("=== rank 1 could not write a stack of Python\nrank 1 of 2 on")
    assert [(record.rank, record.error) for record in read_failures(run.evidence)] == [(0, "Hang"), (1, "Hang")]
    assert "state T (stopped)" in run.text()


def test_rank_0_stopped_of_two(runs: dict[str, Run]) -> None:
    """Its guard runs: it joins the stacks, reports the hang and records it."""
    run = runs["rank 0 stopped"]
    assert run.end(1)[0] == EXIT_HANG
    status, said = run.end(0)
    assert status == -signal.SIGKILL
    assert "hang: training, after step 1, stopped while others wait" in said and "look at rank 0 first" in said
    assert "(it was stopped); killed by its guard" in said
    assert run.text().startswith("=== rank 0 could not write a stack of Python\nrank 0 of 2 on")
    assert (run.record().rank, run.record().error) == (0, "Hang")


def test_a_killed_ranks_compilers_end_with_it(runs: dict[str, Run]) -> None:
    run = runs["compiles"]
    run.wait_until_ready()
    compiler = int((run.folder / "ready-0").read_text())
    run.ranks[0].kill()
    run.end(0)
    until(lambda: not Path(f"/proc/{compiler}").exists() or "(Z" in Path(f"/proc/{compiler}/status").read_text())


def test_a_killed_rank_has_a_record(runs: dict[str, Run]) -> None:
    run = runs["killed"]
    run.wait_until_ready(1)
    run.ranks[1].kill()
    why = "killed from outside (out of memory? kill -9?), or ended by C code"
    assert run.end(1) == (-signal.SIGKILL, f"[rank 1] {why}\n")
    assert (run.record().rank, run.record().error, run.record().consequence) == (1, "Killed", False)


def test_a_crash_in_c_code_has_a_record_with_its_stack(runs: dict[str, Run]) -> None:
    status, said = runs["crash"].end()
    assert status == -signal.SIGSEGV and said.startswith("Fatal Python error: Segmentation fault")
    record = runs["crash"].record()
    assert "in crash" in (record.traceback or "") and record.message == "Fatal Python error: Segmentation fault"


def test_stacks_can_be_asked_for(runs: dict[str, Run]) -> None:
    run = runs["asked"]
    run.wait_until_ready()
    # As Slurm does it, to the guard as well.
    for pid in (run.ranks[0].pid, *children(run.ranks[0].pid)):
        os.kill(pid, DUMP_SIGNAL)
    until((run.evidence / "asked-stacks-00000.txt").exists)
    assert "in wait" in run.text("asked-stacks-00000.txt") and run.ranks[0].poll() is None
    assert len(children(run.ranks[0].pid)) == 1


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_beat_tells_the_limit_of_its_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Immediately: the rank may be stopped in the next moment."""
    limits = WatchdogConfig(start_minutes=120, step_minutes=1, save_minutes=None)
    watchdog = Watchdog(limits, tmp_path, RankInfo(0, 1, 0, 1, "localhost", 0, "single", 0))
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(watchdog, "_tell", lambda **message: told.append(message))
    watchdog.beat()
    watchdog.enter("training")
    watchdog.beat("training", 1)
    watchdog.enter("saving")
    assert [message["limit_s"] for message in told] == [7200, 7200, 60, math.inf]
    os.close(watchdog._scratch)


def test_a_checkpoint_that_is_not_written_is_a_hang(runs: dict[str, Run]) -> None:
    status, said = runs["writes"].end()
    assert status == EXIT_HANG and "a checkpoint has been on its way to the disk for 0:0" in said
