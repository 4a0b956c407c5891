"""StableAdamW against the formula of torch-optimi and Wortsman 2023 in float64, a parameter at a time."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ctxlm_ds.parallel.parameters import ZEROS, ParameterFacts
from ctxlm_ds.training.optimizers.stable_adamw import StableAdamWSection
from tests.published_optimizers import wortsman_2023
from tests.unit.training.optimizers.stepping import take_published_steps, take_steps

STEPS, RATE = 8, 0.01
SHAPES = {"matrix": (6, 5), "tiny": (4, 3), "bias": (7,)}
CONFIG = StableAdamWSection(learning_rate=RATE, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1)
FACTS = {name: ParameterFacts(ZEROS, decays=len(shape) > 1) for name, shape in SHAPES.items()}


def start_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradient(name: str, step: int) -> torch.Tensor:
    """Gradients that grow by a factor of 50 in step 4, those of `tiny` below eps."""
    size = (1e-8 if name == "tiny" else 1.0) * (50.0 if step >= 4 else 1.0)
    return size * torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(100 * step + len(name)))


def test_every_step_is_the_published_one() -> None:
    sizes: dict[str, list[float]] = {}
    found = take_steps(CONFIG, start_values(), FACTS, gradient, STEPS)
    published = partial(wortsman_2023, sizes=sizes)
    wanted = take_published_steps(published, CONFIG, start_values(), FACTS, gradient, STEPS)
    for name, start in start_values().items():
        error = (found[name].double() - wanted[name]).norm() / (wanted[name] - start.double()).norm()
        assert error < 1e-5, name
        rms = sizes[name]
        if name == "tiny":
            assert max(rms[:4]) < 0.1
        else:
            assert rms[0] == pytest.approx(1.0) and rms[4] > 2.0 and min(rms[1:4]) < 1.0
