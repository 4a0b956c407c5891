"""Each rank has the hooks that are its own, and a failing disk stops neither them nor the run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function

from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.recipe.schema import LoggingConfig, ProfilerConfig, RunConfig
from ctxlm_ds.run import build_hooks
from ctxlm_ds.training.hooks.hooks import Hook, Hooks, ProfilerHook, StepMetrics
from tests.unit.training.hooks.test_metrics import end, metrics_of, start


def test_ranks_have_the_hooks_that_are_theirs(tmp_path: Path) -> None:
    config = RunConfig(profiler=ProfilerConfig(num_steps=2))
    assert len(build_hooks(config, tmp_path, Topology())) == 4
    assert len(build_hooks(config, tmp_path, Topology(rank=1, world_size=2))) == 1
    assert build_hooks(RunConfig(), tmp_path, Topology(rank=1, world_size=2)) == []


def test_a_failing_disk_holds_up_lines_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = RunConfig(logging=LoggingConfig(tensorboard=False, interval_steps=1))
    hook: Hook = build_hooks(config, tmp_path / "run", Topology())[0]
    hook.on_run_start(start(0))
    hook.on_step_end(metrics_of(1))
    path = tmp_path / "run" / "metrics.jsonl"
    path.unlink()
    path.mkdir()
    for step in (2, 3):
        hook.on_step_end(metrics_of(step))
    assert caplog.text.count("metrics.jsonl cannot be written (Is a directory)") == 1
    path.rmdir()
    hook.on_step_end(metrics_of(4))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2, 3, 4]
    path.unlink()
    path.mkdir()
    hook.on_step_end(metrics_of(5))
    hook.on_run_end(end(5))
    assert "lacks its last 1 lines" in caplog.text


class Failing(Hook):
    def on_step_end(self, metrics: StepMetrics) -> None:
        raise OSError(5, "Input/output error")


def test_a_failing_disk_silences_a_hook_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
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
    assert caplog.text.count("Failing stops writing") == 1
    with pytest.raises(OSError, match="Input/output error"):
        Hooks([Failing()]).call("on_step_end", metrics_of(1))


def _profiled_run(hook: ProfilerHook, first: int, last: int) -> None:
    hook.on_run_start(start(first - 1))
    for step in range(first, last + 1):
        with record_function(f"my step {step}"):
            torch.ones(4, 4) @ torch.ones(4, 4)
        hook.on_step_end(metrics_of(step))
    hook.on_run_end(end(last))


@pytest.mark.parametrize(
    ("window", "first", "last", "recorded"),
    [
        ((3, 2), 1, 8, [3, 4]),
        ((0, 2), 1, 8, [1, 2]),
        ((1, 1), 1, 8, [1]),
        # The run ends inside the window, or goes on inside it.
        ((3, 5), 1, 4, [3, 4]),
        ((3, 3), 5, 9, [5]),
    ],
)
def test_the_profilers_window(
    tmp_path: Path, window: tuple[int, int], first: int, last: int, recorded: list[int]
) -> None:
    config = ProfilerConfig(start_step=window[0], num_steps=window[1])
    _profiled_run(ProfilerHook(config, tmp_path / "profile", rank=2), first, last)
    stem = f"steps-{recorded[0]:08d}-{recorded[-1]:08d}-rank-00002"
    written = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert written == [f"{stem}.trace.json.gz", f"{stem}.txt"]
    with gzip.open(tmp_path / "profile" / written[0], "rt") as handle:
        names = {event.get("name") for event in json.load(handle)["traceEvents"]}
    assert {name for name in names if str(name).startswith("my step")} == {f"my step {step}" for step in recorded}
    assert "aten::mm" in (tmp_path / "profile" / written[1]).read_text()


@pytest.mark.parametrize(("first", "last"), [(6, 9), (1, 2)])
def test_no_profile_where_the_window_is_not_reached_or_past(tmp_path: Path, first: int, last: int) -> None:
    _profiled_run(ProfilerHook(ProfilerConfig(start_step=3, num_steps=3), tmp_path / "profile", 0), first, last)
    assert not (tmp_path / "profile").exists()
