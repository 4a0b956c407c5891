"""training.ema: the average of a run is that of a float64 loop over its saved weights, in every layout and resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.export.huggingface import to_hf
from ctxlm_ds.recipe.sections import EMA_KIND
from tests.integration.conftest import Prepared
from tests.integration.route import NO_DROPOUT, call, launcher, metrics, pretrain_words

STEPS, DECAY = 5, 0.9


def train(route: Prepared, folder: Path, *overrides: str, ranks: int = 2, stage: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    recipe = route.recipe(
        folder / "recipe.yaml", training={"max_steps": STEPS, "ema": DECAY}, model=NO_DROPOUT,
        checkpoint={"interval_steps": 1, "keep_last": 9}, evaluation={"interval_steps": 3, "max_rows": 16},
        schedule={"warmup_steps": 1},
    )  # fmt: skip
    words = pretrain_words(recipe, [f"run_dir={folder / 'run'}", *overrides], stage)
    call(*launcher("forked", ranks), *words)
    return folder / "run"


def checkpoint(run: Path, step: int) -> CheckpointReader:
    return CheckpointReader(run / "checkpoints" / f"step-{step:08d}")


def check_averages(run: Path) -> None:
    """Compare the last average with a float64 loop that begins with the weights before the first step.

    The first step has rate 0, so its weights are the initial ones.
    """
    last = checkpoint(run, STEPS)
    for name in last.names():
        expected = checkpoint(run, 1).read_full(name).double()
        for step in range(2, STEPS + 1):
            expected = DECAY * expected + (1 - DECAY) * checkpoint(run, step).read_full(name).double()
        found = last.read_full(name, EMA_KIND)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7, msg=name)
        assert not torch.equal(found, last.read_full(name)) or not found.any()


@pytest.fixture(scope="module")
def averaged(bert_route: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(bert_route, tmp_path_factory.mktemp("averaged"))


def test_it_is_the_average_of_the_weights(averaged: Path) -> None:
    check_averages(averaged)


@pytest.mark.parametrize(("axis", "ranks", "stage"), [
    (None, 1, 0), pytest.param(None, 2, 0, marks=pytest.mark.soak), pytest.param(None, 2, 1, marks=pytest.mark.soak),
    (None, 2, 3), ("pipeline", 2, 1), pytest.param("tensor", 2, 1, marks=pytest.mark.soak),
    pytest.param("context", 2, 2, marks=pytest.mark.soak),
])  # fmt: skip
def test_every_layout_has_the_same(
    axis: str | None, ranks: int, stage: int, averaged: Path, bert_route: Prepared, tmp_path: Path
) -> None:
    """Also the losses with the averages, which leave the training as it is."""
    settings = [] if axis is None else [f"parallel.{axis}_parallel_size=2"]
    run = train(bert_route, tmp_path, *settings, ranks=ranks, stage=stage)
    check_averages(run)
    for key in ("loss", "eval/heldout/loss", "eval/heldout/ema_loss"):
        found, expected = metrics(run, key), metrics(averaged, key)
        assert found.keys() == expected.keys() and len(found) > 1
        assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)


@pytest.mark.parametrize(("ranks", "stage"), [(2, 2), (1, 3)])
def test_a_resume_goes_on_with_it(ranks: int, stage: int, averaged: Path, bert_route: Prepared, tmp_path: Path) -> None:
    shutil.copytree(averaged, tmp_path / "run")
    for step in (4, 5):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    run = train(bert_route, tmp_path, ranks=ranks, stage=stage)
    for name in checkpoint(run, STEPS).names():
        found, expected = (checkpoint(each, STEPS).read_full(name, EMA_KIND) for each in (run, averaged))
        assert torch.equal(found, expected) if (ranks, stage) == (2, 2) else torch.allclose(found, expected, rtol=1e-5)


def test_phases_carry_it_on(bert_route: Prepared, averaged: Path, tmp_path: Path) -> None:
    run = train(bert_route, tmp_path, "phases=[{steps: 3}, {steps: 2}]", "training.max_steps=null", stage=2)
    for name in checkpoint(run, STEPS).names():
        found, expected = (checkpoint(each, STEPS).read_full(name, EMA_KIND) for each in (run, averaged))
        assert torch.equal(found, expected)


def test_an_export_without_averages_is_refused(bert_route: Prepared, tmp_path: Path) -> None:
    run = train(bert_route, tmp_path, "training.ema=null", "training.max_steps=1", ranks=1, stage=1)
    with pytest.raises(CheckpointError, match="has no averages: its run has no training.ema; leave out --weights ema"):
        to_hf(run, tmp_path / "hf", averaged=True)
    assert not (tmp_path / "hf").exists()


def test_an_export_has_it(averaged: Path, tmp_path: Path) -> None:
    to_hf(averaged, tmp_path / "trained")
    assert to_hf(averaged, tmp_path / "ema", averaged=True).comparisons
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ema", "trained"))
    words = "bert.embeddings.word_embeddings.weight"
    last = checkpoint(averaged, STEPS)
    expected = last.read_full(next(name for name in last.names() if "word_embeddings" in name), EMA_KIND)
    assert torch.equal(ours[words], expected) and not torch.equal(ours[words], theirs[words])
