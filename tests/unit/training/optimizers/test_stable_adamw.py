"""StableAdamW against the formula of torch-optimi and Wortsman 2023 in float64, a parameter at a time."""

from __future__ import annotations

import pytest
import torch

from ctxlm_ds.parallel.parameters import ZEROS, ParameterFacts
from ctxlm_ds.training.optimizers.stable_adamw import StableAdamWSection
from tests.unit.training.optimizers.stepping import take_steps

STEPS, RATE = 8, 0.01
SHAPES = {"matrix": (6, 5), "tiny": (4, 3), "bias": (7,)}
CONFIG = StableAdamWSection(learning_rate=RATE, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1)


def start_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradient(name: str, step: int) -> torch.Tensor:
    """Gradients that grow by a factor of 50 in step 4, those of `tiny` below eps."""
    size = (1e-8 if name == "tiny" else 1.0) * (50.0 if step >= 4 else 1.0)
    return size * torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(100 * step + len(name)))


def ours() -> dict[str, torch.Tensor]:
    facts = {name: ParameterFacts(ZEROS, decays=len(shape) > 1) for name, shape in SHAPES.items()}
    return take_steps(CONFIG, start_values(), facts, gradient, STEPS)


def published(name: str) -> tuple[torch.Tensor, list[float]]:
    """Debiased betas instead of corrected moments, as torch-optimi has it; also the RMS of each step."""
    x, (beta1, beta2) = start_values()[name].double(), CONFIG.betas
    first = second = torch.zeros_like(x)
    found = []
    for step in range(1, STEPS + 1):
        g = gradient(name, step - 1).double()
        hat1, hat2 = ((beta**step - beta) / (beta**step - 1) for beta in (beta1, beta2))
        first = hat1 * first + (1 - hat1) * g
        second = hat2 * second + (1 - hat2) * g * g
        rms = float((g * g / torch.maximum(second, torch.full_like(second, CONFIG.eps**2))).mean().sqrt())
        rate = RATE / max(1.0, rms)
        x = x * (1 - rate * (CONFIG.weight_decay if x.dim() > 1 else 0.0))
        x = x - rate * first / (second.sqrt() + CONFIG.eps)
        found.append(rms)
    return x, found


@pytest.mark.parametrize("name", SHAPES)
def test_every_step_is_the_published_one(name: str) -> None:
    wanted, rms = published(name)
    start = start_values()[name].double()
    error = (ours()[name].double() - wanted).norm() / (wanted - start).norm()
    assert error < 1e-5
    if name == "tiny":
        assert max(rms[:4]) < 0.1
    else:
        assert rms[0] == pytest.approx(1.0) and rms[4] > 2.0 and min(rms[1:4]) < 1.0
