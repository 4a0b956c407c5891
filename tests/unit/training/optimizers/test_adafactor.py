"""Adafactor against mesh_tensorflow's algorithm in float64, a matrix at a time."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch

from ctxlm_ds.parallel.parameters import ZEROS, ParameterFacts
from ctxlm_ds.parallel.placement import Split
from ctxlm_ds.training.optimizers import adafactor
from ctxlm_ds.training.optimizers.adafactor import AdafactorSection, list_matrices
from tests.published_optimizers import shazeer_2018
from tests.unit.training.optimizers.stepping import take_published_steps, take_steps

RATE, STEPS = 0.01, 12
SHAPES = {"matrix": (130, 200), "stacked": (384, 140), "small": (20, 300), "norm": (50,), "zeros": (8, 8)}
BLOCKS = {"stacked": (128, 128, 128)}


def start_values() -> dict[str, torch.Tensor]:
    values = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) for name, shape in SHAPES.items()
    }
    return values | {"zeros": torch.zeros(SHAPES["zeros"])}


def gradient(name: str, step: int) -> torch.Tensor:
    """Gradients that grow by a factor of 30 in step 5, so that the bound acts."""
    generator = torch.Generator().manual_seed(100 * step + len(name))
    rows = torch.logspace(-2, 1, SHAPES[name][0]).view(-1, *[1] * (len(SHAPES[name]) - 1))
    return (30.0 if step == 5 else 1.0) * rows * torch.randn(SHAPES[name], generator=generator)


FACTS = {name: ParameterFacts(ZEROS, decays=True, split=Split("rows", BLOCKS.get(name, ()))) for name in SHAPES}


def section(weight_decay: float) -> AdafactorSection:
    return AdafactorSection(learning_rate=RATE, weight_decay=weight_decay)


def ours(weight_decay: float = 0.0) -> dict[str, torch.Tensor]:
    return take_steps(section(weight_decay), start_values(), FACTS, gradient, STEPS)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_step_is_the_published_one(weight_decay: float) -> None:
    config, published = section(weight_decay), partial(shazeer_2018, least=128)
    wanted = take_published_steps(published, config, start_values(), FACTS, gradient, STEPS)
    for name, value in ours(weight_decay).items():
        torch.testing.assert_close(value.double(), wanted[name], rtol=1e-5, atol=1e-6, msg=name)


def test_matrices_in_one_parameter_are_separate() -> None:
    found, sums = list_matrices(SHAPES, FACTS)
    assert [(m.first_row, m.rows, m.sums is not None) for m in found["stacked"]] == [
        (0, 128, True), (128, 128, True), (256, 128, True),
    ]  # fmt: skip
    assert [found[name][0].sums is None for name in ("small", "norm", "zeros")] == [True] * 3
    assert sums == 130 + 200 + 3 * (128 + 140)


def test_the_step_of_one_piece_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them together would be a copy of the weights, which the planner does not count."""
    computed: list[weakref.ref[torch.Tensor]] = []
    method = adafactor._update

    def update(*args: Any) -> torch.Tensor:
        assert not any(earlier() is not None for earlier in computed)
        found = method(*args)
        computed.append(weakref.ref(found))
        return found

    monkeypatch.setattr(adafactor, "_update", update)
    ours()
    assert len(computed) == 2 * STEPS * (len(SHAPES) + len(BLOCKS["stacked"]) - 1)


def test_squares_are_the_same_in_any_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ours()
    monkeypatch.setattr(adafactor, "CHUNK_ELEMENTS", 1024)
    assert all(torch.equal(values, whole[name]) for name, values in ours().items())
