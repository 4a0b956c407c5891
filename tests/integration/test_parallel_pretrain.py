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
