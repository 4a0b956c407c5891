"""The guard on real ranks that hold the interpreter, are stopped, crash or are killed (no torch: they start fast)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxlm_ds.errors import EXIT_HANG
from ctxlm_ds.process.run_history import read_failures
from tests.unit.process.watched_runs import NONE, SHORT, Run, Scenario, running, until

SCENARIOS: dict[str, Scenario] = {
    "holds": (SHORT, "hold"),
    "one stopped": ({**SHORT, "start_minutes": 0.1, "step_minutes": 0.1}, "wait", "wait"),
    "rank 0 stopped": ({**SHORT, "start_minutes": 0.1, "step_minutes": 0.1}, "wait", "wait"),
    "compiles": (NONE, "compile"),
    "killed": (NONE, "wait", "wait"),
    "crash": (SHORT, "crash"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp("guard")
        (folder / "run").mkdir()
        return folder

    with running(SCENARIOS, folder_of) as started:
        started["one stopped"].wait_until_ready(1)
        started["one stopped"].ranks[1].send_signal(signal.SIGSTOP)
        started["rank 0 stopped"].wait_until_ready(0)
        started["rank 0 stopped"].ranks[0].send_signal(signal.SIGSTOP)
        yield started


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
