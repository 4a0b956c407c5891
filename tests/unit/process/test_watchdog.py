"""The watchdog on real processes that hang, are paused or are asked for their stacks (no torch: they start fast)."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.errors import EXIT_HANG
from ctxlm_ds.process.guard import DUMP_SIGNAL
from ctxlm_ds.process.launch import RankInfo
from ctxlm_ds.process.watchdog import Watchdog
from ctxlm_ds.recipe.schema import WatchdogConfig
from tests.unit.process.watched_runs import LONGER, NONE, SHORT, Run, Scenario, children, running, until

SCENARIOS: dict[str, Scenario] = {
    "elsewhere": ({**SHORT, "start_minutes": 0.3}, "hang", "hang_elsewhere", "hang"),
    "at start": (SHORT, "hang_at_start"),
    "limits": (LONGER, "go_on"),
    "no limits": (NONE, "go_on"),
    "no folder": (SHORT, "hang"),
    "paused": (SHORT, "pause"),
    "writes": ({**LONGER, "save_minutes": 0.02}, "write"),
    "asked": ({**NONE, "save_minutes": 0.02}, "wait"),
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
        family = [started["paused"].ranks[0].pid, *children(started["paused"].ranks[0].pid)]
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(4.0)  # more than three times the limit
        for pid in family:
            os.kill(pid, signal.SIGCONT)
        assert len(family) == 2
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
    # As Slurm does it, to the guard as well.
    for pid in (run.ranks[0].pid, *children(run.ranks[0].pid)):
        os.kill(pid, DUMP_SIGNAL)
    until((run.evidence / "asked-stacks-00000.txt").exists)
    assert "in wait" in run.text("asked-stacks-00000.txt") and run.ranks[0].poll() is None
    assert len(children(run.ranks[0].pid)) == 1


def test_a_beat_tells_the_limit_of_its_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Immediately: the rank may be stopped in the next moment."""
    limits = WatchdogConfig(start_minutes=120, step_minutes=1, save_minutes=None)
    watchdog = Watchdog(limits, tmp_path, RankInfo(0, 1, 0, 1, "localhost", 0, "single", 0))
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(watchdog, "_tell", lambda **message: told.append(message))
    watchdog.beat()
    watchdog.enter("evaluation")
    watchdog.enter("training")
    watchdog.beat("training", 1)
    watchdog.enter("evaluation")
    watchdog.enter("saving")
    assert [message["limit_s"] for message in told] == [7200, 7200, 7200, 60, 60, math.inf]
    os.close(watchdog._scratch)


def test_a_checkpoint_that_is_not_written_is_a_hang(runs: dict[str, Run]) -> None:
    status, said = runs["writes"].end()
    assert status == EXIT_HANG and "a checkpoint has been on its way to the disk for 0:0" in said
