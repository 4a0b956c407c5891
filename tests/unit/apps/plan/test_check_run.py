"""The check of a recipe for a planned run (its lines: test_check_lines.py)."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.plan import check_run
from ctxlm_ds.apps.plan.check_run import (
    check_only,
    layout_of,
    lines_or_reason,
    parse_arguments,
    planned_model,
    run_lines,
)
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.kernels.implementation import Implementation
from ctxlm_ds.recipe.hardware import GIB
from ctxlm_ds.recipe.json_source import load_deepspeed_json
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.phases import run_phases
from ctxlm_ds.registry import FAMILIES, KERNELS
from tests.families.toy import TOY


@pytest.mark.parametrize("zero", [{"stage": "auto"}, None, "auto"])
def test_a_check_reads_the_stage_as_the_run_does(
    zero: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": zero}))
    monkeypatch.setattr("ctxlm_ds.apps.plan.check_run.lines_or_reason", lambda _: [])
    words = ["--config", "bert-tiny", "--check", "--deepspeed_config", str(tmp_path / "mine.json")]
    check_only(parse_arguments([*words, "--set", "training.precision=fp32"]))
    assert "ZeRO stage 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num-layers", "24"], "unrecognized arguments: --num-layers 24; a setting is --set"),
        ([], "--config RECIPE is missing; --list has the shipped recipes"),
    ],
)
def test_options_that_a_recipe_has_as_settings_are_explained(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(words)
    assert said in capsys.readouterr().err


def test_the_batch_is_the_product_of_its_factors() -> None:
    changes = ["parallel.tensor_parallel_size=2", "training.activation_checkpointing=true", "training.max_tokens=5000"]
    config = run_phases(load_config("bert-base", changes, 8))[0].config
    layout = layout_of(config.parallel, config.training, 1, 8)
    assert run_lines(config.name, config.training, config.data.seq_length, layout, Path("runs/bert-base")) == [
        "bert-base: the recipe is valid for 8 ranks",
        "  batch: 64 (micro) x 4 (accumulation) x 4 (data ranks) = 1,024 rows = 131,072 tokens",
        "  layout: data 4 x tensor 2 x pipeline 1, recomputation; ZeRO stage 1; bf16",
        "  steps: 900,000, 117,964,800,000 tokens in all, at most 5,000 tokens",
        "  run directory: runs/bert-base",
    ]


def test_the_ranks_that_share_rows_are_named() -> None:
    changes = ["parallel.tensor_parallel_size=2", "parallel.context_parallel_size=2"]
    config = run_phases(load_config("bert-base", changes, 8))[0].config
    layout = layout_of(config.parallel, config.training, 1, 8)
    lines = run_lines(config.name, config.training, config.data.seq_length, layout, Path("run"))
    assert lines[0] == "bert-base: the recipe is valid for 8 ranks" and " x 2 (data ranks) = " in lines[1]
    assert lines[2].startswith("  layout: data 2 x context 2 x tensor 2 x pipeline 1; ")


def test_a_ramp_reads_fewer_tokens() -> None:
    ramp = ["training.batch_ramp=[64,64,1000]", "training.max_steps=10", "training.micro_batch_size=64"]
    config = load_config("bert-base", ramp, 1)
    layout = layout_of(config.parallel, config.training, 1, 1)
    lines = run_lines(config.name, config.training, config.data.seq_length, layout, Path("run"))
    assert lines[1].endswith("= 131,072 tokens, from 64 rows (batch_ramp)")
    rows = config.training.rows_after(10)
    assert rows < 10 * 1024 and lines[3] == f"  steps: 10, {rows * 128:,} tokens in all"


@pytest.fixture
def laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 4 cores without a GPU, where 8 GiB are free."""
    monkeypatch.setattr(check_run, "has_gpu", lambda: False)
    monkeypatch.setattr(check_run, "available_cores", lambda: 4)
    monkeypatch.setattr(check_run, "available_memory", lambda: 8 * GIB)


def total_gib(line: str) -> float:
    return float(line.split(" GiB (parameters")[0].rsplit(" ", 1)[1])


@pytest.mark.usefixtures("laptop")
@pytest.mark.parametrize(("has_gpu", "for_gpus"), [(True, False), (False, True)])
def test_parameters_and_memory_are_the_planners(monkeypatch: pytest.MonkeyPatch, has_gpu: bool, for_gpus: bool) -> None:
    """With a GPU here, and for a job that asks for GPUs."""
    monkeypatch.setattr(check_run, "has_gpu", lambda: has_gpu)
    parameters, memory = planned_model(load_config("bert-tiny"), load_deepspeed_json("zero2"), 4, for_gpus=for_gpus)
    assert parameters.startswith("  parameters: ")
    assert memory.startswith("  memory of a rank, planned for a GPU: ") and "GiB (parameters 0." in memory


@pytest.mark.usefixtures("laptop")
def test_without_a_gpu_the_memory_is_that_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("bert-tiny", ["training.precision=fp32", "training.micro_batch_size=8"])
    _, memory, together, plan = planned_model(config, load_deepspeed_json("zero2"), 2, "ctxlm plan --config bert-tiny")
    assert memory.startswith("  memory of a rank, planned for the CPU of this machine in fp32: ")
    need = 2 * (total_gib(memory) + 0.7)
    found = together.removeprefix("  with Python and libraries 2 ranks take about ")
    assert float(found.split(" GiB")[0]) == pytest.approx(need, abs=0.06)
    assert found.endswith("; this machine has 8.0 GiB free")
    assert plan.endswith("to plan for GPUs: ctxlm plan --config bert-tiny --gpu TYPE (A100-80, H100, ...)")
    monkeypatch.setattr(check_run, "available_memory", lambda: GIB // 2)
    together = planned_model(config, load_deepspeed_json("zero2"), 2)[2]
    assert together.endswith("0.5 GiB free, which is too little: lower training.micro_batch_size")


@pytest.mark.usefixtures("laptop")
def test_offloaded_states_are_in_the_memory_of_the_same_machine() -> None:
    config = load_config("bert-tiny", ["training.micro_batch_size=8"])
    offloaded, kept = (planned_model(config, load_deepspeed_json(name), 1)[1] for name in ("zero2-offload", "zero2"))
    assert "optimizer 0.05" in offloaded and total_gib(offloaded) == pytest.approx(total_gib(kept), rel=0.05)


@pytest.mark.usefixtures("laptop")
@pytest.mark.parametrize(
    ("change", "ranks", "reason"),
    [
        ("training.precision=bf16", 8, "8 ranks are more than its 4 cores"),
        ("training.precision=fp16", 1, "training.precision is fp16"),
        ("kernels.attention=varlen", 1, "kernels.attention is varlen"),
        ("kernels.layer_norm=apex", 1, "kernels.layer_norm is apex"),
    ],
)
def test_a_recipe_for_other_machines_is_planned_for_a_gpu(change: str, ranks: int, reason: str) -> None:
    lines = planned_model(load_config("bert-tiny", [change], ranks), load_deepspeed_json("zero1"), ranks)
    assert len(lines) == 2
    assert lines[1].startswith(f"  memory of a rank, planned for a GPU (none is here, and {reason}): ")


def test_a_model_for_other_machines_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS, "_added", {})
    monkeypatch.setattr(KERNELS, "_loaded", {})
    KERNELS.register("linear.wide", Implementation("wide", make=lambda need: None, why_not=lambda need: "no unit is"))
    config = load_config("bert-tiny", ["kernels.linear=wide"])
    (line,) = lines_or_reason(partial(planned_model, config, load_deepspeed_json("zero1"), 1))
    assert line.startswith("  parameters and memory: unknown, ") and "no unit is" in line


@pytest.mark.usefixtures("laptop")
@pytest.mark.parametrize("change", [{"layers": "no_such:layers"}, {}])
def test_a_recipe_is_valid_once_its_model_is_listed(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a family without a published vocabulary, before there is a tokenizer."""
    monkeypatch.setattr(FAMILIES, "_added", {"toy": replace(TOY, **change)})
    monkeypatch.setattr(FAMILIES, "_loaded", {})
    (tmp_path / "toy.yaml").write_text(json.dumps({"name": "toy", **TOY.tiny(), "training": {"precision": "fp32"}}))
    why = r"layers of model\.family toy .* cannot be imported"
    with pytest.raises(ConfigError, match=why) if change else nullcontext():
        check_only(parse_arguments(["--config", str(tmp_path / "toy.yaml"), "--check"]))
    size, out = 32_768 * 16 + 4 * 16**2, capsys.readouterr().out
    for line in ("valid for 1 rank", f"parameters: {size:,} (with a vocabulary of 32,768; the run takes"):
        assert (line in out) == (not change)
