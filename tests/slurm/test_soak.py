"""Many kills over one run: nothing is lost, no damaged checkpoint is accepted, no process is left.

    pytest -m soak tests/slurm/test_soak.py
    CTXLM_SOAK_KILLS=10 CTXLM_SOAK_SEED=3 pytest -m soak tests/slurm/test_soak.py

A kill is a kill -9 of one rank (while it trains, saves or starts), of srun, or of a whole node; some requeues fall in
between.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ctxlm_ds.process.run_history import FAILURE, REQUEUE, START
from tests.slurm.cluster import Cluster
from tests.slurm.runs import Job, Runs

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(4 * 3600)]
KILLS = int(os.environ.get("CTXLM_SOAK_KILLS", "100"))
SEED = int(os.environ.get("CTXLM_SOAK_SEED", "0"))
STEPS_A_KILL = 25
"""At most so many steps pass between a start and its kill, so that the run lasts for all kills."""
SHARES = {"training": 0.45, "saving": 0.25, "starting": 0.1, "srun": 0.05, "node": 0.08, "requeue": 0.07}
RESTART_S = 300.0


@dataclass
class Killer:
    """Draws what happens next to a job, lets it happen, and watches the job come back."""

    job: Job
    cluster: Cluster
    drawn: random.Random
    say: Callable[[str], None]
    done: Counter[str] = field(default_factory=Counter)

    @property
    def kills(self) -> int:
        """What has been killed; a requeue is no kill."""
        return sum(self.done.values()) - self.done["requeue"]

    def disturb(self) -> None:
        """One kill or requeue, and the restart after it."""
        kind = self.drawn.choices(list(SHARES), list(SHARES.values()))[0]
        starts = self.job.events(START)
        saved = self._saved_step()
        at_step = self._reach(kind, starts[-1]["step"])
        node = self._strike(kind)
        if kind == "starting":
            # The next one is killed in its turn, while it imports or loads.
            self.job.wait_for(self.job.ranks, "a rank that starts", RESTART_S)
            time.sleep(self.drawn.uniform(0, 6))
            self._kill_rank()
            self.done["training"] += 1
        self.done[kind] += 1
        self.job.wait_for(lambda: len(self.job.events(START)) > len(starts), f"a restart after {kind}", RESTART_S)
        self._check_restart(saved)
        if node:
            self.cluster.start_node(node)
        self.say(f"{self.kills:4d} kills, {self.done['requeue']} requeues: {kind} at step {at_step}")

    def _reach(self, kind: str, first: int) -> int:
        """Wait for the moment: a number of steps drawn, or the first save after half of them."""
        steps = self.drawn.randint(0, STEPS_A_KILL // (2 if kind == "saving" else 1))
        self.job.wait_for_step(first + steps, RESTART_S)
        if kind == "saving":
            deadline_s = time.monotonic() + RESTART_S
            while not self.job.is_saving():
                assert time.monotonic() < deadline_s, self.job.explain()
                time.sleep(0.001)
            time.sleep(self.drawn.uniform(0, 0.05))
        return self.job.last_step()

    def _strike(self, kind: str) -> str | None:
        """The disturbance; returns the node that lost its power, if one did."""
        if kind == "requeue":
            self.cluster.scontrol("requeue", self.job.id)
        elif kind == "node":
            node = self.drawn.choice(self.job.ranks()).node
            self.cluster.kill_node(node, noticed=True)
            return node
        elif kind == "srun":
            for process in self.cluster.launchers(self.job.id):
                process.send(signal.SIGKILL)
        else:
            self._kill_rank()
        return None

    def _kill_rank(self) -> None:
        if ranks := self.job.ranks():
            self.drawn.choice(ranks).send(signal.SIGKILL)

    def _saved_step(self) -> int:
        latest = self.job.run_dir / "checkpoints" / "latest"
        return int(latest.read_text().rpartition("-")[2]) if latest.exists() else 0

    def _check_restart(self, saved: int) -> None:
        """It went on from the newest checkpoint or a later one, with as many ranks as before and no others."""
        resumed = self.job.events(START)[-1]["step"]
        assert resumed >= saved, f"resumed at step {resumed} although step {saved} was saved\n{self.job.explain()}"
        ranks = [rank.rank for rank in self.job.ranks()]
        assert ranks == [0, 1], f"ranks {ranks} are running\n{self.job.explain()}"


def test_a_run_survives_many_kills(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = (KILLS + KILLS // 4 + 10) * STEPS_A_KILL // 5 * 4  # on average half as many pass between kills
    length = {"training": {"max_steps": steps}, "evaluation": {"interval_steps": 100}}
    began_s = time.monotonic()

    def say(line: str) -> None:
        with capsys.disabled():
            print(f"{time.monotonic() - began_s:7.0f} s {line}", flush=True)

    whole = runs.submit(tmp_path / "whole", **length)
    whole.assert_finished(3600)
    say(f"{steps} steps without a disturbance; seed {SEED}, {KILLS} kills to come")
    # Kills come thick: several starts in a row may end before a checkpoint, which the default takes for hopeless.
    job = runs.submit(tmp_path, environment={"CTXLM_MAX_RESTARTS": "20"}, **length)
    job.wait_for_event(START)
    killer = Killer(job, runs.cluster, random.Random(SEED), say)
    while killer.kills < KILLS:
        killer.disturb()
    job.assert_finished(3600)
    assert job.curves() == whole.curves()
    say(
        f"{killer.kills} kills ({dict(killer.done)}): {len(job.events(START)) - 1} restarts, "
        f"{len(job.events(FAILURE))} failures seen by the job, {len(job.events(REQUEUE))} requeues by itself, "
        f"{job.restarts()} by Slurm; finished, {steps} steps bitwise equal"
    )
