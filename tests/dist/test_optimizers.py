"""Every optimizer treats complete parameters in every layout: against the published update of one process, float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.parallel.parameters import ParameterFacts
from ctxlm_ds.recipe import choices
from ctxlm_ds.training.optimizers import adafactor
from tests.dist.reference import Split, Tensors, Update, assert_equals_alone, train_alone
from tests.dist.runner import ranks_of_this_file, run_ranks  # noqa: F401
from tests.dist.states import Layout, assert_states_equal, resume_under, save_under
from tests.dist.training import tiny_config, train

pytestmark = pytest.mark.dist
STEPS, RATE, LEAST = 3, 0.02, 8
COMMON = {"learning_rate": RATE, "weight_decay": 0.1, "gradient_clipping": 0.0}
OPTIMIZERS = {
    name: choices.OPTIMIZER.make(name=name, **{**COMMON, **own})
    for name, own in {
        "adafactor": {},
        "adagrad": {"learning_rate": 0.05, "eps": 1e-10, "initial_accumulator": 0.0025},
        "lamb": {"eps": 1e-6},
        # With a small second beta and gradients that change from step to step, the bound acts.
        "stable_adamw": {"betas": (0.9, 0.8), "eps": 1e-6},
        "muon": {"learning_rate": 0.01, "matrix_learning_rate": RATE, "eps": 1e-6, "gradient_clipping": 0.5},
    }.items()
}


@pytest.fixture(autouse=True)
def small_matrices_are_factored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adafactor, "LEAST_SIZE_TO_FACTOR", LEAST)


def zeros(parameters: Tensors) -> Tensors:
    return {name: torch.zeros_like(p) for name, p in parameters.items()}


def decay_of(name: str, facts: dict[str, ParameterFacts]) -> float:
    return 0.1 if facts[name].decays else 0.0


def shazeer_2018(parameters: Tensors, facts: dict[str, ParameterFacts]) -> Update:
    """mesh_tensorflow's AdafactorOptimizer, a matrix at a time."""
    second = zeros(parameters)

    def update(step: int, gradients: Tensors) -> None:
        decay = 1.0 - step**-0.8
        for name, parameter in parameters.items():
            split = facts[name].split
            blocks = split.blocks if split is not None and split.blocks else (parameter.shape[0],)
            parts = zip(parameter.split(blocks), gradients[name].split(blocks), second[name].split(blocks), strict=True)
            for p, g, v in parts:
                v.mul_(decay).add_((1 - decay) * (g * g + 1e-30))
                estimate = v
                if p.dim() == 2 and min(p.shape) >= LEAST:
                    estimate = v.mean(1)[:, None] * v.mean(0)[None, :] / v.mean()
                step_of = g * estimate.rsqrt()
                step_of = step_of / max(1.0, float(step_of.square().mean().sqrt()))
                rate = RATE * max(1e-3, float(p.square().mean().sqrt()))
                p.mul_(1 - rate * decay_of(name, facts)).sub_(rate * step_of)

    return update


def duchi_2011(parameters: Tensors, facts: dict[str, ParameterFacts]) -> Update:
    """tf.train.AdagradOptimizer with decoupled decay."""
    totals = {name: torch.full_like(p, 0.0025) for name, p in parameters.items()}

    def update(step: int, gradients: Tensors) -> None:
        for name, p in parameters.items():
            totals[name] += gradients[name] ** 2
            p.mul_(1 - 0.05 * decay_of(name, facts)).sub_(0.05 * gradients[name] / totals[name].sqrt())

    return update


def you_2019(parameters: Tensors, facts: dict[str, ParameterFacts]) -> Update:
    """LAMB, algorithm 2, a parameter at a time."""
    first, second = zeros(parameters), zeros(parameters)
    beta1, beta2 = OPTIMIZERS["lamb"].betas

    def update(step: int, gradients: Tensors) -> None:
        for name, p in parameters.items():
            g = gradients[name]
            first[name] = beta1 * first[name] + (1 - beta1) * g
            second[name] = beta2 * second[name] + (1 - beta2) * g * g
            adapted = first[name] / (1 - beta1**step)
            adapted = adapted / ((second[name] / (1 - beta2**step)).sqrt() + 1e-6)
            if p.ndim > 1:
                adapted = adapted + 0.1 * p
                adapted = adapted * (p.norm() / adapted.norm())
            p -= RATE * adapted

    return update


RMS: list[float] = []
"""Of each gradient of StableAdamW's reference, in units of its moment."""


def wortsman_2023(parameters: Tensors, facts: dict[str, ParameterFacts]) -> Update:
    """StableAdamW, algorithm 2, a parameter at a time."""
    first, second = zeros(parameters), zeros(parameters)
    beta1, beta2 = OPTIMIZERS["stable_adamw"].betas

    def update(step: int, gradients: Tensors) -> None:
        for name, p in parameters.items():
            g = gradients[name]
            first[name] = beta1 * first[name] + (1 - beta1) * g
            second[name] = beta2 * second[name] + (1 - beta2) * g * g
            m, v = first[name] / (1 - beta1**step), second[name] / (1 - beta2**step)
            RMS.append(float((g * g / v.clamp_min(1e-12)).mean().sqrt()))
            rate = RATE / max(1.0, RMS[-1])
            p.mul_(1 - rate * decay_of(name, facts)).sub_(rate * m / (v.sqrt() + 1e-6))

    return update


def jordan_2024(parameters: Tensors, facts: dict[str, ParameterFacts]) -> Update:
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
    section = OPTIMIZERS["muon"]
    muon = torch.optim.Muon(
        matrices, lr=RATE, weight_decay=0.1, momentum=section.momentum, adjust_lr_fn=section.matrix_scale
    )
    groups = [{"params": plain[decays], "weight_decay": 0.1 * decays} for decays in (True, False)]
    adamw = torch.optim.AdamW(groups, section.learning_rate, section.betas, section.eps, foreach=False)

    def update(step: int, gradients: Tensors) -> None:
        for name, gradient in gradients.items():
            for part, of_part in zip(parts[name], gradient.split([len(p) for p in parts[name]]), strict=True):
                part.grad = of_part.clone()
        torch.nn.utils.clip_grad_norm_([p for own in parts.values() for p in own], section.gradient_clipping)
        for optimizer in (muon, adamw):
            optimizer.step()

    return update


PUBLISHED = {
    "adafactor": shazeer_2018, "adagrad": duchi_2011, "lamb": you_2019, "stable_adamw": wortsman_2023,
    "muon": jordan_2024,
}  # fmt: skip


@pytest.fixture(scope="module")
def references() -> dict[str, tuple[list[float], Tensors]]:
    """Losses of the steps and the weights after them."""
    with pytest.MonkeyPatch.context() as patch:
        # torch's Muon would compute in bf16.
        patch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
        return {
            name: train_alone(tiny_config(optimizer=OPTIMIZERS[name]), STEPS, published)
            for name, published in PUBLISHED.items()
        }


CONTEXT = [Split(2, 0, context=2), Split(2, 1, context=2)]
FEW = [Split(2, 3), Split(4, 1, 2, 2)]
MORE = [Split(1, 0), Split(2, 1), Split(2, 2), Split(2, 3), Split(4, 1, 2), Split(2, 0, 1, 2)]
SPLITS = {
    "adafactor": MORE + CONTEXT, "adagrad": FEW, "lamb": [*MORE, Split(4, 1, 2, 2), *CONTEXT],
    "stable_adamw": FEW + CONTEXT[1:], "muon": [*MORE, Split(4, 1, 2, 2), *CONTEXT],
}  # fmt: skip
"""In every run of the tests; a stage's shards are cut alike for all, what each does with whole matrices is its own."""
MOST = [
    *MORE, Split(2, 0, 2), Split(4, 1, 2, 2), Split(8, 1, 2, 2), Split(2, 0), Split(4, 2, 2), Split(4, 3, 2, 1, True),
    Split(4, 1, 1, 2), Split(8, 1, 2, 2, True), Split(1, 3), Split(4, 0, 2),
    *CONTEXT, Split(2, 3, context=2), Split(4, 2, context=2), Split(4, 1, 2, context=2),
]  # fmt: skip
OFFLOAD, OFFLOAD_ALL = (
    {name: {"device": "cpu"} for name in ("offload_optimizer", "offload_param")[:n]} for n in (1, 2)
)
OFFLOADED = [
    ("lamb", 1, OFFLOAD), ("lamb", 3, OFFLOAD_ALL), ("muon", 2, OFFLOAD),
    ("muon", 3, {**OFFLOAD, "sub_group_size": 500}),
    *(pytest.param("lamb", stage, OFFLOAD, marks=pytest.mark.soak) for stage in (2, 3)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "split"),
    [
        pytest.param(name, split, marks=[pytest.mark.soak] * (split not in SPLITS[name]))
        for name in SPLITS
        for split in MOST
    ],
    ids=str,
)
def test_a_layout_equals_the_float64_reference(references: Any, name: str, split: Split) -> None:
    assert_equals_alone(references[name], OPTIMIZERS[name], split)


@pytest.mark.parametrize(("name", "stage", "zero"), OFFLOADED, ids=str)
def test_offloaded_and_in_sub_groups_it_is_the_same(
    references: Any, name: str, stage: int, zero: dict[str, Any]
) -> None:
    assert_equals_alone(references[name], OPTIMIZERS[name], Split(2, stage), zero)


def test_the_comparisons_can_fail(references: Any) -> None:
    """StableAdamW's bound acts, and halves of a matrix have trust ratios that differ by more than the tolerance."""
    top, bottom = references["lamb"][1]["encoder.0.mlp.up.weight"].chunk(2)
    assert abs(float(top.norm() / bottom.norm()) - 1) > 1e-3 and max(RMS) > 1.1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_parameter_moves_in_bf16(stage: int) -> None:
    config = tiny_config(optimizer=OPTIMIZERS["muon"])
    config = config.model_copy(update={"training": config.training.model_copy(update={"precision": "bf16"})})
    user = {"zero_optimization": {"stage": stage}}
    start, after = (run_ranks(train, 2, config, user, steps, timeout_s=180)[0]["weights"] for steps in (0, 2))
    assert [name for name in start if torch.equal(start[name], after[name])] == []


SAVED = Layout(2, 3, dropout=0.0)


@pytest.mark.parametrize("layout", [SAVED, Layout(4, 1, tensor=2, dropout=0.0), Layout(1, 0, dropout=0.0)], ids=str)
def test_a_checkpoint_of_muon_goes_on_in_any_layout(tmp_path: Path, layout: Layout) -> None:
    saved = save_under(SAVED, tmp_path, "muon")
    resumed = resume_under(layout, tmp_path, "muon")
    assert_states_equal(saved, resumed)
    kinds = [name.partition("#")[2] for name in saved["moments"]]
    assert kinds.count("exp_avg") > kinds.count("exp_avg_sq") > 0
    assert resumed["losses"] == (saved["losses"] if layout == SAVED else pytest.approx(saved["losses"], rel=1e-5))
