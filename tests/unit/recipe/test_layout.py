"""Layouts: each impossible one is told with its numbers and a remedy that is possible, and all at once."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ctxlm_ds.recipe.check import find_problems, unused_settings
from ctxlm_ds.recipe.layout import layout_problems
from tests.unit.recipe.test_check import config_of

CASES: list[tuple[dict[str, Any], int | None, str, list[str]]] = [
    ({"parallel": {"tensor_parallel_size": 8}}, None, "parallel.tensor_parallel_size", ["heads 12", "4, 6 or 12"]),
    (
        {"parallel": {"tensor_parallel_size": 2}, "model": {"intermediate_size": 3071}},
        None,
        "parallel.tensor_parallel_size",
        ["model.intermediate_size 3071", "1 would do"],
    ),
    (
        {"parallel": {"tensor_parallel_size": 2}, "optimizer": {"name": "lamb"}, "kernels": {"optimizer": "apex"}},
        None,
        "kernels.optimizer",
        ["trust ratios", "set auto or reference"],
    ),
    ({"parallel": {"sequence_parallel": True}}, None, "parallel.sequence_parallel", ["tensor_parallel_size is 1"]),
    (
        {
            "parallel": {"sequence_parallel": True, "tensor_parallel_size": 4},
            "training": {"micro_batch_size": 1, "global_batch_size": 8},
            "data": {"seq_length": 126},
        },
        None,
        "parallel.sequence_parallel",
        ["1 x data.seq_length 126 = 126", "micro_batch_size to 2"],
    ),
    ({"parallel": {"pipeline_parallel_size": 16}}, None, "parallel.pipeline_parallel_size", ["16", "12 layers"]),
    ({"parallel": {"pipeline_layers": [6, 6]}}, None, "parallel.pipeline_layers", ["2 stages", "size is 1"]),
    (
        {"parallel": {"pipeline_parallel_size": 2, "pipeline_layers": [6, 7]}},
        None,
        "parallel.pipeline_layers",
        ["13", "has 12 layers"],
    ),
    ({"parallel": {"tensor_parallel_size": 4}}, 6, "parallel", ["6 ranks", "start 4 or 8 ranks"]),
    ({"parallel": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}}, 4, "parallel", ["= 8", "start 8 ranks"]),
    (
        {"parallel": {"tensor_parallel_size": 2}, "training": {"global_batch_size": 100, "micro_batch_size": 10}},
        8,
        "training.global_batch_size",
        ["4 data-parallel ranks = 40", "80 or 120", "micro_batch_size to 5"],
    ),
]


@pytest.mark.parametrize(("sections", "world_size", "path", "words"), CASES)
def test_each_impossible_layout(sections: dict[str, Any], world_size: int | None, path: str, words: list[str]) -> None:
    problems = find_problems(config_of(**sections), world_size)
    assert [problem.path for problem in problems] == [path]
    for word in words:
        assert word in problems[0].text


@pytest.mark.parametrize(
    ("parallel", "world_size"),
    [
        ({}, 16),
        ({"tensor_parallel_size": 4, "sequence_parallel": True}, 16),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 4}, 8),
        ({"pipeline_parallel_size": 3, "pipeline_layers": [3, 5, 4]}, 6),
        ({"tensor_parallel_size": 12, "vocab_multiple": 64}, None),
    ],
)
def test_possible_layouts(parallel: dict[str, Any], world_size: int | None) -> None:
    config = config_of(parallel=parallel, training={"global_batch_size": 128})
    assert not list(layout_problems(config, world_size, zero_stage=1))


def test_every_problem_at_once() -> None:
    config = config_of(
        parallel={
            "tensor_parallel_size": 5,
            "pipeline_parallel_size": 13,
            "pipeline_layers": [12],
            "sequence_parallel": True,
        },
        training={"micro_batch_size": 3, "global_batch_size": 12},
        data={"seq_length": 127},
    )
    paths = [problem.path for problem in layout_problems(config, 66, zero_stage=3)]
    assert paths == [
        "parallel.tensor_parallel_size",
        "parallel.tensor_parallel_size",
        "parallel.sequence_parallel",
        "parallel.pipeline_parallel_size",
        "parallel.pipeline_layers",
        "parallel",
        "zero_optimization.stage",
    ]


def test_deepspeeds_pipeline_engine_really_refuses_stage_2() -> None:
    """The rule's reason, read from the line of DeepSpeed that it stands for."""
    import inspect

    from deepspeed.runtime.pipe.engine import PipelineEngine

    source = inspect.getsource(PipelineEngine)
    assert re.search(r"assert self\.zero_optimization_stage\(\s*\) < ZeroStageEnum\.gradients", source)


def test_settings_without_effect_in_this_layout() -> None:
    idle = unused_settings(config_of(parallel={"pipeline_partition": "uniform"}))
    assert [line.split(":")[0] for line in idle] == ["parallel.pipeline_partition"]
    assert not unused_settings(config_of(parallel={"pipeline_parallel_size": 2, "pipeline_partition": "uniform"}))
