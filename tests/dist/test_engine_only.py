"""training.only: parameters that are not chosen keep their values, and the others train as if they were all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.parallel.parameters import ParameterFacts, fix_others
from ctxlm_ds.recipe import choices
from tests.dist.reference import Split, Tensors, Update, assert_equals_alone, train_alone
from tests.dist.runner import ranks_of_this_file, run_ranks  # noqa: F401
from tests.dist.states import SAVED, SAVED_STEP, Layout, resume_newest, save_at, some_steps
from tests.dist.training import build_engine, gather_weights, tiny_config, train

pytestmark = pytest.mark.dist
STEPS, RATE, CLIP = 3, 0.02, 0.05
ONLY = ["embeddings", "encoder.1.mlp"]
ADAMW = choices.OPTIMIZER.make(learning_rate=RATE, weight_decay=0.1, gradient_clipping=CLIP, eps=1e-3)
SPLITS = [Split(2, 0), Split(2, 1, 2), Split(2, 2), Split(2, 3), Split(2, 1, 1, 2)]


def config_of(**settings: Any) -> Any:
    return tiny_config(**settings).with_values("training", only=ONLY)


def chosen(facts: dict[str, ParameterFacts]) -> set[str]:
    return {name for name, own in fix_others(facts, ONLY).items() if not own.fixed}


def only_some(parameters: Tensors, facts: dict[str, ParameterFacts]) -> Update:
    """AdamW over the chosen parameters alone, whose norm is clipped."""
    names = sorted(chosen(facts))
    groups = [{"params": [parameters[name] for name in names if facts[name].decays == decays],
               "weight_decay": 0.1 * decays} for decays in (True, False)]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=ADAMW.betas, eps=ADAMW.eps)

    def update(step: int, gradients: Tensors) -> None:
        for name in names:
            parameters[name].grad = gradients[name]
        norm = torch.nn.utils.clip_grad_norm_([parameters[name] for name in names], CLIP)
        assert norm > CLIP
        optimizer.step()

    return update


@pytest.fixture(scope="module")
def alone() -> Any:
    config = config_of(optimizer=ADAMW)
    losses, weights = train_alone(config, STEPS, only_some)
    start, _ = train_alone(config, 1, lambda parameters, facts: lambda step, gradients: None)
    assert losses[0] == start[0] and losses[-1] != start[0]
    return losses, weights


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_layout_equals_the_float64_reference(alone: Any, split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.dist.reference.tiny_config", config_of)
    assert_equals_alone(alone, ADAMW, split)


@pytest.mark.parametrize("name", ["lamb", "muon", "adafactor", "adagrad", "stable_adamw"])
def test_every_optimizer_leaves_the_others_bitwise(name: str) -> None:
    config = config_of(optimizer=choices.OPTIMIZER.make(name=name, weight_decay=0.1))
    user = {"zero_optimization": {"stage": 1}}
    start, after = (run_ranks(train, 2, config, user, steps, timeout_s=180)[0]["weights"] for steps in (0, 2))
    moved = {name for name in start if not torch.equal(start[name], after[name])}
    assert moved and all(name.startswith(("word_", "mlm_", "embeddings.", "encoder.1.mlp")) for name in moved)
    assert not any(value.isnan().any() for value in after.values())


def save_then_train_all(rank: int, world_size: int, run_dir: Path) -> dict[str, Any]:
    """A bf16 run of the chosen parameters, whose checkpoint it reads again, and a run of all that resumes from it."""
    layout = Layout(2, 1, "bf16")
    config = layout.config().with_values("training", only=ONLY)
    engine = build_engine(config, layout.user_json())
    start = gather_weights(engine)
    some_steps(engine, 0, SAVED_STEP)
    save_at(engine, config, run_dir, SAVED)
    losses = some_steps(engine, SAVED_STEP, SAVED_STEP + 1)
    again = build_engine(config, layout.user_json())
    resume_newest(again, config, run_dir)
    resumed = some_steps(again, SAVED_STEP, SAVED_STEP + 1)
    whole = build_engine(layout.config(), layout.user_json())
    resume_newest(whole, layout.config(), run_dir)
    saved = gather_weights(whole)
    some_steps(whole, SAVED_STEP, SAVED_STEP + 1)
    return {"start": start, "saved": saved, "after": gather_weights(whole), "losses": (losses, resumed)}


def test_checkpoints_hold_all_values_and_the_moments_of_the_trained(tmp_path: Path) -> None:
    found = run_ranks(save_then_train_all, 2, tmp_path, timeout_s=180)[0]
    reader = CheckpointReader(tmp_path / "checkpoints" / f"step-{SAVED_STEP:08d}")
    trained = {name for name in reader.names() if len(reader.kinds(name)) > 1}
    assert 0 < len(trained) < len(reader.names())
    for name in reader.names():
        assert torch.equal(reader.read_full(name), found["saved"][name])
        assert torch.equal(found["start"][name], found["saved"][name]) == (name not in trained), name
    assert found["losses"][0] == found["losses"][1]
    assert all(not torch.equal(found["saved"][name], value) for name, value in found["after"].items())
