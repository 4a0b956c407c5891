"""The moving average of tensors that an optimizer steps."""

from __future__ import annotations

import torch

from ctxlm_ds.recipe.sections import EMA_KIND
from ctxlm_ds.training.engine.average import WeightAverage


def averaged(decay: float, *owners: torch.Tensor) -> tuple[WeightAverage, list[int]]:
    changed: list[int] = []
    return WeightAverage(decay, lambda: owners, lambda: changed.append(1)), changed


def test_it_follows_the_weights_from_its_beginning() -> None:
    weights = torch.tensor([1.0, 2.0]), torch.tensor([4.0])
    average, _ = averaged(0.75, *weights)
    assert not average.is_kept and average.of(weights[0]) == {} and average.kinds == (EMA_KIND,)
    average.begin()
    for owner in weights:
        owner.add_(4.0)
    average.update()
    average.begin()  # which does nothing now
    assert [average.of(one)[EMA_KIND].tolist() for one in weights] == [[2.0, 3.0], [5.0]]
    average.forget()
    assert not average.is_kept


def test_weights_come_back_bit_for_bit_from_an_evaluation() -> None:
    owner = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    average, changed = averaged(0.9, owner)
    average.begin()
    before = owner.clone()
    owner.mul_(0.1)
    trained = owner.clone()
    average.update()
    mean = average.of(owner)[EMA_KIND].clone()
    with average.in_place_of_the_weights():
        assert torch.equal(owner, mean) and not torch.equal(mean, before) and len(changed) == 1
    assert torch.equal(owner, trained) and torch.equal(average.of(owner)[EMA_KIND], mean) and len(changed) == 2
