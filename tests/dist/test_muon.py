"""Muon orthogonalises complete matrices in every layout: against torch.optim.Muon on one process in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ctxlm_ds.parallel.megatron  # noqa: F401 (imported before the ranks are forked: it takes seconds)
from ctxlm_ds.recipe import choices
from ctxlm_ds.parallel.parameters import ParameterFacts
from tests.dist.reference import SPLIT, Split, Tensors, Update, assert_equals_alone, train_alone
from tests.dist.runner import run_ranks
from tests.dist.states import Layout, assert_states_equal, resume_under, save_under
from tests.dist.training import tiny_config, train

pytestmark = pytest.mark.dist
STEPS = 4
OPTIMIZER = choices.OPTIMIZER.make(
    name="muon", learning_rate=0.01, matrix_learning_rate=0.02, weight_decay=0.1, eps=1e-6, gradient_clipping=0.5
)


def torch_on_matrices(parameters: Tensors, facts: dict[str, ParameterFacts]) -> Update:
    """torch's Muon for each matrix, query, key and value apart, and AdamW for the rest."""
    matrices: list[torch.nn.Parameter] = []
    plain: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    parts: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in parameters.items():
        split = facts[name].split
        blocks = (split.blocks if split and facts[name].matrix else ()) or (parameter.shape[0],)
        # Views: a step on a part changes the parameter.
        parts[name] = [torch.nn.Parameter(part) for part in parameter.split(blocks)]
        (matrices if facts[name].matrix else plain[facts[name].decays]).extend(parts[name])
    muon = torch.optim.Muon(
        matrices, lr=0.02, weight_decay=OPTIMIZER.weight_decay, momentum=OPTIMIZER.momentum,
        adjust_lr_fn=OPTIMIZER.matrix_scale,
    )  # fmt: skip
    groups = [{"params": plain[decays], "weight_decay": 0.1 * decays} for decays in (True, False)]
    adamw = torch.optim.AdamW(groups, OPTIMIZER.learning_rate, OPTIMIZER.betas, OPTIMIZER.eps, foreach=False)

    def update(step: int, gradients: Tensors) -> None:
        for name, gradient in gradients.items():
            for part, of_part in zip(parts[name], gradient.split([len(p) for p in parts[name]]), strict=True):
                part.grad = of_part.clone()
        torch.nn.utils.clip_grad_norm_([p for own in parts.values() for p in own], OPTIMIZER.gradient_clipping)
        for optimizer in (muon, adamw):
            optimizer.step()

    return update


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], Tensors]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
        return train_alone(tiny_config(optimizer=OPTIMIZER), STEPS, torch_on_matrices)


PLAIN = [Split(*case) for case in ((1, 0), (2, 0), (1, 1), (2, 1), (4, 1), (2, 2), (1, 3), (2, 3), (4, 3))]


@pytest.mark.parametrize("split", [*PLAIN, *SPLIT, Split(4, 0, 2)], ids=str)
def test_muon_equals_torch_on_complete_matrices(reference: tuple[list[float], Tensors], split: Split) -> None:
    assert_equals_alone(reference, OPTIMIZER, split)


@pytest.mark.parametrize(
    "user",
    [
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        {"stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 500},
    ],
    ids=str,
)
def test_offloaded_and_in_sub_groups_it_is_the_same(
    reference: tuple[list[float], Tensors], user: dict[str, Any]
) -> None:
    assert_equals_alone(reference, OPTIMIZER, Split(2, user["stage"]), user)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_parameter_moves_in_bf16(stage: int) -> None:
    config = tiny_config(optimizer=OPTIMIZER)
    config = config.model_copy(update={"training": config.training.model_copy(update={"precision": "bf16"})})
    user = {"zero_optimization": {"stage": stage}}
    start, after = (run_ranks(train, 2, config, user, steps, timeout_s=180)[0]["weights"] for steps in (0, 2))
    assert [name for name in start if torch.equal(start[name], after[name])] == []


SAVED = Layout(2, 3, dropout=0.0)


@pytest.mark.parametrize("layout", [SAVED, Layout(4, 1, tensor=2, dropout=0.0), Layout(1, 0, dropout=0.0)], ids=str)
def test_a_checkpoint_goes_on_in_any_layout(tmp_path: Path, layout: Layout) -> None:
    saved = save_under(SAVED, tmp_path, "muon")
    resumed = resume_under(layout, tmp_path, "muon")
    assert_states_equal(saved, resumed)
    kinds = [name.partition("#")[2] for name in saved["moments"]]
    assert kinds.count("exp_avg") > kinds.count("exp_avg_sq") > 0
    assert resumed["losses"] == (saved["losses"] if layout == SAVED else pytest.approx(saved["losses"], rel=1e-5))
