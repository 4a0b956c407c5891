"""Pretraining jobs on the test cluster: submitted as a user would, watched from outside, compared by their curves.

In: a Cluster and a prepared route. Out: `Runs`, which submits, and `Job`. Not here: faults (the cluster has them).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.checkpoint.folders import list_checkpoints
from ctxlm_ds.checkpoint.manifest import verify
from ctxlm_ds.process.run_history import END, read_history
from tests.integration.conftest import Prepared
from tests.integration.route import call, last_step, launcher, metrics
from tests.slurm.cluster import Cluster, Rank

PRETRAIN = "slurm/pretrain.sbatch"
LOOK_S = 3.0
CURVES = ("loss", "grad_norm", "eval/heldout/loss")


@dataclass(frozen=True)
class Job:
    """A submitted run."""

    cluster: Cluster
    id: str
    run_dir: Path
    log: Path

    # ---- what it has done

    def last_step(self) -> int:
        """The newest step in metrics.jsonl, 0 before the first."""
        return last_step(self.run_dir)

    def curves(self) -> dict[str, dict[int, float]]:
        """Loss, gradient norm and held-out loss by step."""
        return curves(self.run_dir)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The run's history, or its events of one kind."""
        return [event for event in read_history(self.run_dir) if kind in (None, event["event"])]

    def text(self) -> str:
        """The job's log so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def restarts(self) -> int:
        """How often Slurm has put it back into the queue."""
        return int(self.cluster.job(self.id)["Restarts"])

    def ranks(self) -> list[Rank]:
        """Its live ranks."""
        return self.cluster.ranks(self.id)

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written (or was, by a rank that died)."""
        folder = self.run_dir / "checkpoints"
        return folder.is_dir() and any(path.name.endswith(".partial") for path in folder.iterdir())

    def status(self) -> dict[str, Any]:
        """What tools/run_status.py says of it on a login node."""
        (found,) = json.loads(self.cluster.run(sys.executable, "tools/run_status.py", self.run_dir, "--json").stdout)
        return dict(found)

    # ---- waiting for it

    def wait_for_step(self, step: int, timeout_s: float = 180) -> None:
        """Poll until this step is in metrics.jsonl."""
        self.wait_for(lambda: self.last_step() >= step, f"step {step}", timeout_s)

    def wait_for_event(self, kind: str, count: int = 1, timeout_s: float = 180) -> list[dict[str, Any]]:
        """Poll until the history has `count` events of this kind; returns them."""
        self.wait_for(lambda: len(self.events(kind)) >= count, f"{count} events {kind}", timeout_s)
        return self.events(kind)

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = 180) -> None:
        """Poll; the job's log is shown where it takes too long, or where the job is over."""
        deadline_s = time.monotonic() + timeout_s
        look_s = time.monotonic() + LOOK_S
        while not condition():
            now_s = time.monotonic()
            if now_s > look_s:
                look_s = now_s + LOOK_S
                assert not self.is_over() or condition(), f"the job ended without {what}\n{self.explain()}"
            assert now_s < deadline_s, f"timed out waiting for {what}\n{self.explain()}"
            time.sleep(0.02)

    def is_over(self) -> bool:
        """Whether Slurm will not run it any more."""
        return not self.cluster.run("squeue", "-h", "-j", self.id, check=False).stdout.strip()

    def end(self, timeout_s: float = 420) -> str:
        """The state in which the job ended."""
        return self.cluster.wait(self.id, timeout_s)

    def assert_finished(self, timeout_s: float = 420, strays_s: float = 20) -> None:
        """It completed, all checkpoints are intact, none is half, and no process is left `strays_s` later."""
        state = self.end(timeout_s)
        assert state == "COMPLETED", f"{state}\n{self.explain()}"
        last = self.events(END)[-1]
        assert last["completed"] and not last["failed"], self.explain()
        assert not self.is_saving(), "a half checkpoint is left"
        self.verify_checkpoints()
        self.cluster.assert_no_strays(strays_s)

    def verify_checkpoints(self) -> None:
        """Every checkpoint's files have the sizes and checksums of its manifest."""
        found = list_checkpoints(self.run_dir / "checkpoints")
        assert found, "no checkpoint"
        for folder in found.values():
            verify(folder)

    def explain(self) -> str:
        """What a reader of a failed test needs."""
        history = "\n".join(map(str, self.events()))
        shown = self.cluster.run("scontrol", "show", "job", self.id, check=False).stdout
        return f"--- history\n{history}\n--- log of job {self.id}\n{self.text()[-8000:]}\n--- {shown[:600]}"


def curves(run_dir: Path) -> dict[str, dict[int, float]]:
    """Loss, gradient norm and held-out loss by step."""
    return {key: metrics(run_dir, key) for key in CURVES}


def assert_close(found: Mapping[str, Mapping[int, float]], expected: Mapping[str, Mapping[int, float]]) -> None:
    """Curves equal to a relative 1e-5."""
    for key, values in expected.items():
        assert values, f"nothing to compare {key} with"
        assert found[key] == pytest.approx(values, rel=1e-5), key


@dataclass
class Runs:
    """Submits jobs of one prepared route; keeps undisturbed runs, one for each number of ranks, to compare with."""

    cluster: Cluster
    route: Prepared
    folder: Path
    _undisturbed: dict[int, dict[str, dict[int, float]]] = field(default_factory=dict)

    def recipe(self, folder: Path, **sections: dict[str, Any]) -> Path:
        """The tiny recipe: 120 steps, a checkpoint every 10, a line of metrics every step."""
        folder.mkdir(parents=True, exist_ok=True)
        settings: dict[str, dict[str, Any]] = {
            "training": {"global_batch_size": 12, "micro_batch_size": 3, "max_steps": 120},
            "checkpoint": {"interval_steps": 10, "keep_last": 2},
            "evaluation": {"interval_steps": 40, "max_rows": 24},
        }
        for name, section in sections.items():
            settings[name] = {**settings.get(name, {}), **section}
        return self.route.recipe(folder / "recipe.yaml", **settings)

    def submit(
        self,
        folder: Path,
        *options: object,
        nodes: int | str = 2,
        tasks: int | None = 1,
        overrides: tuple[str, ...] = (),
        words: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        **sections: dict[str, Any],
    ) -> Job:
        """`sbatch OPTIONS slurm/pretrain.sbatch RECIPE --set run_dir=FOLDER/run ...`; no pause before restarts."""
        options = (f"--nodes={nodes}", *([f"--ntasks-per-node={tasks}"] if tasks is not None else []), *options)
        recipe = self.recipe(folder, **sections)
        run_dir = folder / "run"
        log = folder / f"job-{time.time_ns()}.log"
        job = self.cluster.sbatch(
            *options, f"--output={log}", PRETRAIN, recipe, "--set", f"run_dir={run_dir}", *overrides, *words,
            **{"CTXLM_RESTART_DELAY_S": "0", **(environment or {})},
        )  # fmt: skip
        return Job(self.cluster, job, run_dir, log)

    def undisturbed(self, ranks: int = 2) -> dict[str, dict[int, float]]:
        """Curves of a run that nothing happens to, on one machine without Slurm."""
        if ranks not in self._undisturbed:
            folder = self.folder / f"undisturbed-{ranks}"
            words = ("--config", self.recipe(folder), "--set", f"run_dir={folder / 'run'}")
            call(*launcher("forked", ranks), *words)
            self._undisturbed[ranks] = curves(folder / "run")
        return self._undisturbed[ranks]
