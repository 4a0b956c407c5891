"""The lines of `--check`: the batch by its factors, tokens, the layout, and the planner's figures."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.planning import check_lines
from ctxlm_ds.planning.check_lines import model_lines, planned_model, run_lines
from ctxlm_ds.recipe.deepspeed import load_deepspeed_json
from ctxlm_ds.recipe.load import load_config


def test_the_batch_is_the_product_of_its_factors() -> None:
    changes = ["parallel.tensor_parallel_size=2", "training.activation_checkpointing=true", "training.max_tokens=5000"]
    config = load_config("bert-base", changes, 8)
    assert run_lines(config, 1, 8, Path("runs/bert-base")) == [
        "bert-base: the recipe is valid for 8 ranks",
        "  batch: 64 (micro) x 4 (accumulation) x 4 (data ranks) = 1,024 rows = 131,072 tokens",
        "  layout: data 4 x tensor 2 x pipeline 1, recomputation; ZeRO stage 1; bf16",
        "  steps: 900,000, 117,964,800,000 tokens in all, at most 5,000 tokens",
        "  run directory: runs/bert-base",
    ]


def test_a_ramp_reads_fewer_tokens() -> None:
    ramp = ["training.batch_ramp=[64,64,1000]", "training.max_steps=10", "training.micro_batch_size=64"]
    lines = run_lines(load_config("bert-base", ramp, 1), 1, 1, Path("run"))
    assert lines[1].endswith("= 131,072 tokens, from 64 rows (batch_ramp)")
    rows = load_config("bert-base", ramp, 1).training.rows_after(10)
    assert rows < 10 * 1024 and lines[3] == f"  steps: 10, {rows * 128:,} tokens in all"


def test_parameters_and_memory_are_the_planners() -> None:
    lines = planned_model(load_config("bert-tiny"), load_deepspeed_json("zero2"), 4)
    assert lines[0].startswith("  parameters: ") and "GiB (parameters 0." in lines[1]


@pytest.mark.parametrize(
    ("status", "said", "line"),
    [
        (0, "  parameters: 7\n", "  parameters: 7"),
        (2, "error: no vocabulary", "  parameters and memory: unknown, no vocabulary"),
        (-9, "", "  parameters and memory: unknown, exit status -9"),
    ],
)
def test_a_planner_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch, status: int, said: str, line: str) -> None:
    def run(command: Any, **_: Any) -> Any:
        return subprocess.CompletedProcess(command, status, said, said)

    monkeypatch.setattr(check_lines.subprocess, "run", run)
    assert model_lines(load_config("bert-tiny"), {}, 1) == [line]


def test_a_login_node_without_torch_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_lines.importlib.util, "find_spec", lambda name: None)
    assert model_lines(load_config("bert-tiny"), {}, 1) == [
        "  parameters and memory: unknown, torch is not installed here"
    ]
