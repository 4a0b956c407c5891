"""Runs whose checkpoints lie on disks that hang, fill up or turn read-only: real ones, mounted for the test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ctxlm_ds.checkpoint.folders import REMOVING_SUFFIX
from ctxlm_ds.checkpoint.manifest import verify
from ctxlm_ds.errors import EXIT_HANG
from ctxlm_ds.process.failure import read_failures
from ctxlm_ds.process.run_history import SAVE_FAILED, read_history
from tests.integration.conftest import Prepared
from tests.integration.route import launcher, metrics, pretrain_words, start, wait_for
from tests.real_disks import Disk, freezable_disk, memory_disk

WAIT_S = 180.0
pytestmark = pytest.mark.timeout(900)


def words(route: Prepared, folder: Path, *overrides: str) -> list[object]:
    recipe = route.recipe(
        folder / "recipe.yaml", training={"max_steps": 100_000}, checkpoint={"interval_steps": 5, "keep_last": 2},
        evaluation={"interval_steps": 1000}, schedule={"total_steps": 100_000, "warmup_steps": 5},
    )  # fmt: skip
    return [*launcher("forked", 1), *pretrain_words(recipe, [f"run_dir={folder / 'run'}", *overrides])]


def last_step(log: Path) -> int:
    """As told on stderr, which needs no disk of the run's."""
    steps = re.findall(r" step (\d+)/", log.read_text()) if log.exists() else []
    return int(steps[-1]) if steps else 0


def folders(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.glob("step-*"))


def saved_after(checkpoints: Path, step: int) -> bool:
    return any(name > f"step-{step:08d}" for name in folders(checkpoints) if "." not in name)


def test_a_run_outlives_full_and_read_only_disks(bert_route: Prepared, tmp_path: Path) -> None:
    """It goes on without checkpoints, tells why, and saves again once it can; also at its end."""
    run_dir, checkpoints, log = tmp_path / "run", tmp_path / "run" / "checkpoints", tmp_path / "log"
    with memory_disk(run_dir, "4m") as small, memory_disk(checkpoints, "64m") as disk:

        def spoil(fault: str) -> None:
            if fault == "full":
                disk.fill()
                small.fill()
            else:
                wait_for(lambda: disk.remount("ro"), WAIT_S, "a moment without writing")

        def mend(fault: str) -> None:
            if fault == "full":
                # The run may end as soon as it can save; what it has not recorded by then needs the other disk.
                small.empty()
                disk.empty()
            else:
                disk.remount("rw")

        def failures(why: str = "") -> list[str]:
            told = re.findall(".* training continues and tries again soon", log.read_text())
            return [line for line in told if why in line]

        process = start(words(bert_route, tmp_path, "checkpoint.max_failed_saves=1000"), log)
        try:
            for fault, why in (("full", "GB are missing"), ("read-only", "mounted read-only")):
                begin = last_step(log)
                wait_for(lambda s=begin: saved_after(checkpoints, s), WAIT_S, "a checkpoint")
                spoil(fault)
                wait_for(lambda w=why: len(failures(w)) >= 2, WAIT_S, "two saves that fail")
                step, left = last_step(log), folders(checkpoints)
                wait_for(lambda s=step: last_step(log) > s + 5, WAIT_S, "training to go on")
                assert process.poll() is None
                assert left and folders(checkpoints) == left and not any("partial" in name for name in left)
                # The disk may turn read-only while rotation removes a checkpoint; the next save removes the rest.
                for name in (name for name in left if not name.endswith(REMOVING_SUFFIX)):
                    verify(checkpoints / name)
                mend(fault)
                wait_for(lambda s=step: saved_after(checkpoints, s), WAIT_S, "a save after the trouble")
            spoil("full")
            process.terminate()
            wait_for(lambda: "Trying again in 2 s" in log.read_text(), WAIT_S, "the last save to fail")
            mend("full")
            assert process.wait(timeout=WAIT_S) == 143
        finally:
            process.kill()
            process.wait()
        assert "Traceback" not in log.read_text()
        assert folders(checkpoints)[-1] == f"step-{last_step(log):08d}" and len(folders(checkpoints)) == 2
        # Nothing of what was recorded meanwhile is lost.
        assert sorted(metrics(run_dir)) == list(range(1, last_step(log) + 1))
        told = [event["why"] for event in read_history(run_dir) if event["event"] == SAVE_FAILED]
        assert len(told) >= len(failures())
        assert any("GB are missing" in why for why in told) and any("read-only" in why for why in told)


def test_a_write_that_hangs_trips_the_watchdog(bert_route: Prepared, tmp_path: Path) -> None:
    """Although training goes on beside it; the stacks show the thread that writes."""
    run_dir, checkpoints, log = tmp_path / "run", tmp_path / "run" / "checkpoints", tmp_path / "log"
    with freezable_disk(checkpoints, tmp_path / "image") as disk:
        limits = ("checkpoint.interval_steps=100", "watchdog.save_minutes=0.02")
        process = start(words(bert_route, tmp_path, *limits), log, CTXLM_ATTEMPT="try")
        stacks = run_dir / "attempts" / "try" / "stacks.txt"
        try:
            catch_a_save(checkpoints, disk)
            wait_for(stacks.exists, WAIT_S, "stacks")
        finally:
            # A process whose write hangs ends once the disk answers.
            disk.thaw()
            process.wait(timeout=WAIT_S)
        assert process.returncode == EXIT_HANG
        assert re.search("(write|complete)-step-100", stacks.read_text())
        (failure,) = read_failures(stacks.parent)
        assert failure.error == "Hang" and "a checkpoint has been on its way to the disk for" in failure.message
        assert folders(checkpoints) in ([], ["step-00000100.partial"])


def catch_a_save(checkpoints: Path, disk: Disk) -> None:
    """Freeze the disk while a checkpoint is being written."""

    def is_saving() -> bool:
        return any(name.endswith(".partial") for name in folders(checkpoints))

    def is_caught() -> bool:
        if not is_saving():
            return False
        disk.freeze()
        if is_saving():
            return True
        disk.thaw()
        return False

    wait_for(is_caught, WAIT_S, "a save to hang")
