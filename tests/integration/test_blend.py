"""Blended sources and a split in real runs: planned, evaluated, continued elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.conftest import Prepared
from tests.integration.route import call, launcher, metrics, pretrain_words

pytestmark = pytest.mark.soak


def words(route: Prepared, folder: Path, blend: str, ranks: int, *overrides: str) -> list[object]:
    weight = "epochs" if blend == "concatenate" else "weight"
    train = [{"path": str(route.train), weight: 3}, {"path": str(route.heldout), weight: 1, "name": "second"}]
    recipe = route.recipe(
        folder / "recipe.yaml", model={"hidden_dropout": 0.0, "attention_dropout": 0.0},
        data={"train": train, "blend": blend, "split": "80,10,10", "validation": []},
        schedule={"total_steps": 12},
    )  # fmt: skip
    return [*launcher("forked", ranks), *pretrain_words(recipe, [f"run_dir={folder / 'run'}", *overrides])]


@pytest.mark.parametrize("blend", ["weighted", "megatron", "concatenate"])
def test_a_blended_run_goes_on_where_it_stopped(bert_route: Prepared, tmp_path: Path, blend: str) -> None:
    (tmp_path / "whole").mkdir()
    done = call(*words(bert_route, tmp_path / "whole", blend, 2))
    plan = re.findall(r" ((?:train_text_sentence|second) .*)", done.stderr)
    assert [line.split()[1] for line in plan[:4]] == ["48", "12", "6", "2"]
    call(*words(bert_route, tmp_path, blend, 2, "training.max_steps=5"))
    refused = call(*words(bert_route, tmp_path, blend, 1, "data.split='90,5,5'", "data.seq_length=16"), check=False)
    assert refused.returncode == 2
    assert "data.split: '80,10,10' -> '90,5,5'" in refused.stderr
    assert "data.seq_length: 32 -> 16" in refused.stderr
    call(*words(bert_route, tmp_path, blend, 1))
    for name in ("loss", "eval/train_text_sentence/loss", "eval/second/loss"):
        whole, stopped = metrics(tmp_path / "whole" / "run", name), metrics(tmp_path / "run", name)
        assert {step: stopped[step] for step in whole} == pytest.approx(whole, rel=1e-5)


def test_the_middle_of_a_pipeline_keeps_step(bert_route: Prepared, tmp_path: Path) -> None:
    """Three stages: the one between reads no data, and the run ends like one without stages."""
    layers = ("model.num_layers=3", "training.max_steps=4")
    (tmp_path / "plain").mkdir()
    call(*words(bert_route, tmp_path / "plain", "weighted", 1, *layers))
    call(*words(bert_route, tmp_path, "weighted", 3, *layers, "parallel.pipeline_parallel_size=3"))
    assert metrics(tmp_path / "run") == pytest.approx(metrics(tmp_path / "plain" / "run"), rel=1e-4)
