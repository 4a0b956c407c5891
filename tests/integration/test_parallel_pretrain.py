"""Pretraining from the command line under tensor and pipeline parallelism, going on under other layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import Prepared
from tests.integration.route import call, launcher, metrics, pretrain_words, tool

LAYOUT = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "sequence_parallel": True}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def words(run_dir: Path, max_steps: int, **layout: object) -> list[str]:
    pairs = [f"parallel.{key}={value}" for key, value in layout.items()]
    return [f"run_dir={run_dir}", f"training.max_steps={max_steps}", *pairs]


def test_a_run_changes_its_layout_at_every_restart(bert_route: Prepared, tmp_path: Path) -> None:
    """Three starts of 4 steps each: tp2 x pp2, then ZeRO 3 on two ranks, then one process; as one run of 12."""
    schedule = {"total_steps": 12, "warmup_steps": 5}
    recipe = bert_route.recipe(tmp_path / "tiny.yaml", model=NO_DROPOUT, schedule=schedule)
    straight, changing = tmp_path / "straight", tmp_path / "changing"
    call(*launcher("forked", 1), *pretrain_words(recipe, words(straight, 12)))
    first = call(*launcher("forked", 4), *pretrain_words(recipe, words(changing, 4, **LAYOUT)))
    assert "pipeline: 1, 1 transformer layers on stages 0 to 1" in first.stderr
    exported = tool("convert_checkpoint.py", "to-hf", "--checkpoint", changing, "--output", tmp_path / "hf")
    assert "BertForPreTraining" in exported.stdout
    second = call(*launcher("deepspeed", 2), *pretrain_words(recipe, words(changing, 8), stage=3))
    assert "resuming exactly, but not bitwise: world_size 4 -> 2, tensor_parallel_size 2 -> 1" in second.stderr
    call(*launcher("forked", 1), *pretrain_words(recipe, words(changing, 12)))
    for key in ("loss", "grad_norm", "eval/heldout/loss"):
        expected, got = metrics(straight, key), metrics(changing, key)
        # A start that ends evaluates its last step too.
        assert expected.keys() <= got.keys()
        assert {step: got[step] for step in expected} == pytest.approx(expected, rel=1e-5), key
    assert metrics(changing, "tokens")[12] == metrics(straight, "tokens")[12]


@pytest.mark.parametrize("key", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_an_impossible_layout_is_refused_before_any_rank_joins(bert_route: Prepared, tmp_path: Path, key: str) -> None:
    """Every finding in one message, from a login node and from a rank alike; no process group, no run directory."""
    recipe = bert_route.recipe(tmp_path / "tiny.yaml")
    run_dir = tmp_path / "run"
    overrides = [*words(run_dir, 4, **{key: 3}), "training.micro_batch_size=3"]
    for extra in (["--check", "--world-size", 4], []):
        done = call(*launcher("forked", 1), *pretrain_words(recipe, overrides, stage=3), *extra, check=False)
        assert done.returncode == 2
        assert f"parallel.{key}" in done.stderr and "training.global_batch_size" in done.stderr
        assert "Traceback" not in done.stderr
    assert not run_dir.exists()


def test_the_middle_stage_of_a_pipeline_trains_without_reading_data(bert_route: Prepared, tmp_path: Path) -> None:
    recipe = bert_route.recipe(
        tmp_path / "tiny.yaml", model={**NO_DROPOUT, "num_layers": 3}, schedule={"warmup_steps": 1}
    )
    call(*launcher("forked", 1), *pretrain_words(recipe, words(tmp_path / "one", 3)))
    call(*launcher("forked", 3), *pretrain_words(recipe, words(tmp_path / "split", 3, pipeline_parallel_size=3)))
    assert metrics(tmp_path / "split", "loss") == pytest.approx(metrics(tmp_path / "one", "loss"), rel=1e-5)
