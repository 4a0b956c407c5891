"""Every optimizer treats complete parameters in every layout: against the published update of one process, float64."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.recipe import choices
from ctxlm_ds.training.optimizers import adafactor
from tests.dist.reference import Split, assert_equals_alone, train_alone
from tests.dist.runner import ranks_of_this_file, run_ranks  # noqa: F401
from tests.dist.states import Layout, assert_states_equal, resume_under, save_under
from tests.dist.training import tiny_config, train
from tests.published_optimizers import Tensors, duchi_2011, jordan_2024, shazeer_2018, wortsman_2023, you_2019

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


RMS: dict[str, list[float]] = {}
"""Of each gradient of StableAdamW's reference, in units of its moment."""
PUBLISHED = {
    "adafactor": partial(shazeer_2018, least=LEAST), "adagrad": duchi_2011, "lamb": you_2019,
    "stable_adamw": partial(wortsman_2023, sizes=RMS), "muon": jordan_2024,
}  # fmt: skip


@pytest.fixture(scope="module")
def references() -> dict[str, tuple[list[float], Tensors]]:
    """Losses of the steps and the weights after them."""
    with pytest.MonkeyPatch.context() as patch:
        # torch's Muon would compute in bf16.
        patch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
        return {
            name: train_alone(tiny_config(optimizer=OPTIMIZERS[name]), STEPS, partial(published, OPTIMIZERS[name]))
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
    assert abs(float(top.norm() / bottom.norm()) - 1) > 1e-3 and max(map(max, RMS.values())) > 1.1


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
