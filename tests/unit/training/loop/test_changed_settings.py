"""What a resume reports: every changed setting with both values, a warning if the curve changes."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ctxlm_ds.training.loop.changed_settings import report_resume
from tests.sections import changed_config

SAVED = {"training": {"max_steps": 300, "global_batch_size": 64}, "optimizer": {"learning_rate": 1e-3}}


@pytest.fixture
def report(caplog: pytest.LogCaptureFixture) -> Any:

    def run(changes: dict[str, Any], environment: list[str] | None = None) -> tuple[list[str], list[tuple[int, str]]]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "ctxlm_ds"):
            found = report_resume(changed_config(SAVED, {}), changed_config(SAVED, changes), 100, environment or [])
        return found, [(record.levelno, record.getMessage()) for record in caplog.records]

    return run


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer.learning_rate": 5e-3}, ["optimizer.learning_rate 0.001 -> 0.005", "of step 101: 0.0006667 ->"]),
        ({"training.global_batch_size": 32}, ["training.global_batch_size 64 -> 32"]),
        ({"schedule.name": "constant"}, ["schedule.name linear -> constant", "of step 101: 0.0006667 -> 0.001"]),
        ({"training.max_steps": 150}, ["training.max_steps 300 -> 150", "learning rate of step 101"]),
        ({"optimizer.weight_decay": 0.1}, ["optimizer.weight_decay 0.01 -> 0.1"]),
        ({"optimizer.gradient_clipping": 0.0}, ["optimizer.gradient_clipping 1.0 -> 0.0"]),
    ],
)
def test_a_changed_curve_is_a_warning(report: Any, changes: dict[str, Any], words: list[str]) -> None:
    found, lines = report(changes, ["world_size 1 -> 2"])
    (level, warning), (_, setting), (_, rounding) = lines
    assert level == logging.WARNING and "its curve is not that of an uninterrupted run" in warning
    assert found == [words[0]] and setting == f"  {words[0]}"
    for word in words[1:]:
        assert word in warning
    assert rounding == "resuming with other rounding: world_size 1 -> 2"


def test_a_longer_run_of_a_fixed_schedule_keeps_its_curve(report: Any) -> None:
    fixed = changed_config(SAVED, {"schedule.total_steps": 300})
    longer = changed_config(SAVED, {"schedule.total_steps": 300, "training.max_steps": 500})
    assert report_resume(fixed, longer, 100, []) == ["training.max_steps 300 -> 500"]
    _, lines = report({"logging.interval_steps": 1})
    assert lines == [
        (20, "settings changed since the checkpoint, without effect on the curve:"),
        (20, "  logging.interval_steps 10 -> 1"),
    ]


def test_another_layout_or_kernel_is_exact_but_not_bitwise(report: Any) -> None:
    changes = {"parallel.tensor_parallel_size": 2, "kernels.attention": "reference"}
    found, lines = report(changes, ["tensor_parallel_size 1 -> 2"])
    assert lines == [
        (20, "resuming exactly, but not bitwise: tensor_parallel_size 1 -> 2, kernels.attention auto -> reference")
    ]
    assert found == ["parallel.tensor_parallel_size 1 -> 2", "kernels.attention auto -> reference"]


def test_nothing_is_said_of_an_equal_resume(report: Any) -> None:
    assert report({"logging.tensorboard": True}) == ([], [])
