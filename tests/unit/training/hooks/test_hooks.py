"""Each rank has the hooks that are its own, and a failing disk stops neither them nor the run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.recipe.schema import LoggingConfig, ProfilerConfig, RunConfig
from ctxlm_ds.run import build_hooks
from ctxlm_ds.training.hooks.hooks import Hook, Hooks, StepMetrics
from tests.unit.training.hooks.test_metrics import end, metrics_of, start


def test_ranks_have_the_hooks_that_are_theirs(tmp_path: Path) -> None:
    config = RunConfig(profiler=ProfilerConfig(num_steps=2))
    assert len(build_hooks(config, tmp_path, Topology())) == 4
    assert len(build_hooks(config, tmp_path, Topology(rank=1, world_size=2))) == 1
    assert build_hooks(RunConfig(), tmp_path, Topology(rank=1, world_size=2)) == []


def test_a_failing_disk_holds_up_lines_and_not_the_run(tmp_path: Path, log: io.StringIO) -> None:
    config = RunConfig(logging=LoggingConfig(tensorboard=False, interval_steps=1))
    hook: Hook = build_hooks(config, tmp_path / "run", Topology())[0]
    hook.on_run_start(start(0))
    hook.on_step_end(metrics_of(1))
    path = tmp_path / "run" / "metrics.jsonl"
    path.unlink()
    path.mkdir()
    for step in (2, 3):
        hook.on_step_end(metrics_of(step))
    assert log.getvalue().count("metrics.jsonl cannot be written (Is a directory)") == 1
    path.rmdir()
    hook.on_step_end(metrics_of(4))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2, 3, 4]
    path.unlink()
    path.mkdir()
    hook.on_step_end(metrics_of(5))
    hook.on_run_end(end(5))
    assert "lacks its last 1 lines" in log.getvalue()


class Failing(Hook):
    def on_step_end(self, metrics: StepMetrics) -> None:
        raise OSError(5, "Input/output error")


def test_a_failing_disk_silences_a_hook_and_not_the_run(log: io.StringIO) -> None:
    steps: list[int] = []

    class Recorder(Hook):
        def on_step_end(self, metrics: StepMetrics) -> None:
            steps.append(metrics.step)

    failing = Failing()
    failing.may_fail = True
    hooks = Hooks([failing, Recorder()])
    for step in (1, 2):
        hooks.call("on_step_end", metrics_of(step))
    assert steps == [1, 2]
    assert log.getvalue().count("Failing stops writing") == 1
    with pytest.raises(OSError, match="Input/output error"):
        Hooks([Failing()]).call("on_step_end", metrics_of(1))
