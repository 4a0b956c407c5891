"""Real ranks of which one stands still or fails: the job ends, and what it leaves names that one."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.errors import EXIT_HANG
from ctxlm_ds.process.failure import read_failures
from ctxlm_ds.process.run_history import read_history
from tests.integration.conftest import Prepared
from tests.integration.route import BIN, FORKED, NO_DROPOUT, ROOT, Finished, alone_losses, call, metrics, pretrain_words

PROGRAM = ROOT / "tests" / "integration" / "misbehaving.py"
STEP = 4


def misbehave(
    route: Prepared, folder: Path, how: str, ranks: int, kind: str = "torchrun", looks_s: int = 1, **watchdog: Any
) -> tuple[Finished, Path]:
    """Rank 1 does `how` at the beginning of its fifth step; the finished job and the folder of its evidence."""
    training = {"global_batch_size": 12, "max_steps": 8}
    recipe = route.recipe(folder / "recipe.yaml", model=NO_DROPOUT, watchdog=watchdog, training=training)
    words = [PROGRAM, how, 1, STEP, *pretrain_words(recipe, [f"run_dir={folder / 'run'}"])]
    torchrun = ["--standalone", "--monitor-interval", looks_s, "--nproc_per_node", ranks]
    launchers = {
        "torchrun": [BIN / kind, *torchrun], "deepspeed": [BIN / kind, "--num_gpus", ranks], FORKED: [FORKED, ranks]
    }  # fmt: skip
    done = call(*launchers[kind], *words, check=False, PYTHONPATH=str(ROOT), CTXLM_ATTEMPT="try")
    assert done.returncode != 0, done.stderr[-4000:]
    return done, folder / "run" / "attempts" / "try"


@pytest.mark.parametrize("kind", [FORKED, pytest.param("torchrun", marks=pytest.mark.soak)])
def test_a_stopped_rank_ends_the_job(kind: str, bert_route: Prepared, tmp_path: Path) -> None:
    done, evidence = misbehave(bert_route, tmp_path, "stop", 2, kind, step_minutes=0.1)
    assert f"exitcode  : {EXIT_HANG}" in done.stderr or (kind, done.returncode) == (FORKED, EXIT_HANG)
    joined = (evidence / "stacks.txt").read_text()
    assert joined.startswith("=== rank 1 left no stacks")
    assert "=== rank 0 is here (waiting for other ranks)" in joined and "train_step" in joined
    first = read_failures(evidence)[0]
    assert (first.rank, first.error, first.exit_status) == (0, "Hang", EXIT_HANG)
    assert f"training, after step {STEP}" in first.message and "look at rank 1 first" in first.message
    assert f"hang: training, after step {STEP}" in done.stderr


@pytest.mark.parametrize("kind", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.soak)])
def test_a_failing_rank_is_told_from_the_one_that_lost_it(kind: str, bert_route: Prepared, tmp_path: Path) -> None:
    done, evidence = misbehave(bert_route, tmp_path, "fail", 2, kind)
    assert "[rank 1] ValueError: a bug of one rank\n" in done.stderr
    own = [line for line in done.stderr.splitlines() if line.startswith("[rank 0]")]
    assert len(own) == 1 and own[0].startswith("[rank 0] lost the others: ")
    cause, consequence = read_failures(evidence)
    assert (cause.rank, cause.error, cause.exit_status) == (1, "ValueError", 1) and not cause.consequence
    assert "a bug of one rank" in str(cause.traceback)
    assert consequence.rank == 0 and consequence.consequence
    start, end = read_history(tmp_path / "run")
    assert (start["event"], start["step"], start["world_size"], start["launcher"]) == ("start", 0, 2, kind)
    assert (end["event"], end["step"], end["completed"], end["failed"]) == ("end", STEP, False, True)
    assert metrics(tmp_path / "run") == pytest.approx(alone_losses(tmp_path, STEP), rel=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize(("how", "begin"), [("sleep", "is here"), ("hold", "left no stacks")])
def test_a_hanging_rank_of_three_is_named_first(how: str, begin: str, bert_route: Prepared, tmp_path: Path) -> None:
    _, evidence = misbehave(bert_route, tmp_path, how, 3, step_minutes=0.1)
    joined = (evidence / "stacks.txt").read_text()
    assert joined.startswith(f"=== rank 1 {begin}") and "=== ranks 0, 2 are here" in joined
    assert how == "hold" or "sleep_in_python" in joined.partition("=== ranks 0, 2 are here")[0]


@pytest.mark.soak
@pytest.mark.parametrize("how", ["kill", "crash"])
def test_the_others_of_a_dying_rank_are_no_cause(how: str, bert_route: Prepared, tmp_path: Path) -> None:
    done, evidence = misbehave(bert_route, tmp_path, how, 3)
    assert {record.consequence for record in read_failures(evidence)} <= {True}
    assert ("Fatal Python error: Segmentation fault" in done.stderr) == (how == "crash")
    assert f"exitcode  : {-signal.SIGKILL if how == 'kill' else -signal.SIGSEGV}" in done.stderr
