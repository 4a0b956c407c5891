"""The profiler writes its window, and nothing if the run ends before it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function

from ctxlm_ds.recipe.schema import ProfilerConfig
from ctxlm_ds.training.hooks.profiler import ProfilerHook
from tests.unit.training.hooks.test_metrics import end, metrics_of, start


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
