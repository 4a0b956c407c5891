"""Muon against torch.optim.Muon and torch.optim.AdamW in float64, on one rank that holds complete parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ctxlm_ds.parallel.parameters import ZEROS, ParameterFacts
from ctxlm_ds.parallel.placement import ROWS, Split
from ctxlm_ds.training.optimizers.matrix_work import blocks_of
from ctxlm_ds.training.optimizers.muon import MuonSection, orthogonalize
from tests.published_optimizers import jordan_2024
from tests.unit.training.optimizers.stepping import take_published_steps, take_steps

STEPS, RATE, MATRIX_RATE = 20, 0.01, 0.03
BLOCKS = {"qkv": (6, 6, 6), "grouped": (6, 2, 2)}
FACTS = {
    "wide": ParameterFacts(ZEROS, decays=True, split=ROWS, matrix=True),
    "tall": ParameterFacts(ZEROS, decays=True, matrix=True),
    "square": ParameterFacts(ZEROS, decays=True, matrix=True),
    "qkv": ParameterFacts(ZEROS, decays=True, split=Split("rows", BLOCKS["qkv"]), matrix=True),
    "grouped": ParameterFacts(ZEROS, decays=True, split=Split("rows", BLOCKS["grouped"]), matrix=True),
    "table": ParameterFacts(ZEROS, decays=True),
    "bias": ParameterFacts(ZEROS, decays=False),
}
SHAPES = {
    "wide": (4, 9), "tall": (9, 4), "square": (5, 5), "qkv": (18, 6), "grouped": (10, 6), "table": (11, 3), "bias": (7,)
}  # fmt: skip


def start_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def gradient(name: str, step: int) -> torch.Tensor:
    """Gradients of very different sizes, which the update of a matrix must not depend on."""
    generator = torch.Generator().manual_seed(100 * step + len(name))
    return 10.0 ** (step % 7 - 3) * torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def config_of(**settings: Any) -> MuonSection:
    values = {"learning_rate": RATE, "matrix_learning_rate": MATRIX_RATE, "weight_decay": 0.1, "eps": 1e-6,
              "gradient_clipping": 0.0}  # fmt: skip
    return MuonSection(**values | settings)


def ours(config: MuonSection) -> dict[str, torch.Tensor]:
    return take_steps(config, start_values(), FACTS, gradient, STEPS)


@pytest.fixture
def float64_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep torch.optim.Muon from rounding matrices to bf16."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())


@pytest.mark.usefixtures("float64_in_torch")
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.0}, {"momentum": 0.0}, {"momentum": 0.5}], ids=str)
def test_twenty_steps_are_those_of_torch(scale: str, settings: dict[str, Any]) -> None:
    config = config_of(matrix_scale=scale, **settings)
    found = ours(config)
    wanted = take_published_steps(jordan_2024, config, start_values(), FACTS, gradient, STEPS)
    for name, start in start_values().items():
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-9, atol=1e-10, msg=name)
        assert (found[name] - start).abs().min() > 0


def test_without_its_own_rate_a_matrix_has_that_of_the_rest() -> None:
    plain, same = ours(config_of(matrix_learning_rate=None)), ours(config_of(matrix_learning_rate=RATE))
    assert all(torch.equal(plain[name], same[name]) for name in SHAPES)


def test_a_gradient_of_zero_changes_nothing() -> None:
    assert torch.equal(orthogonalize(torch.zeros(1, 3, 5)), torch.zeros(1, 3, 5))


PLAIN = ParameterFacts(ZEROS, decays=True, matrix=True)
QKV = ParameterFacts(ZEROS, decays=True, split=Split("rows", (4, 2, 2)), matrix=True)


@pytest.mark.parametrize(("facts", "shape"), [(PLAIN, (8, 8)), (PLAIN, (12, 5)), (PLAIN, (5, 12)), (QKV, (8, 6))])
def test_operations_are_those_that_torch_counts(facts: ParameterFacts, shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        for block in blocks_of(facts, shape[0]):
            orthogonalize(torch.ones(1, block, shape[1]))
    assert counter.get_total_flops() == MuonSection().matrix_flops(blocks_of(facts, shape[0]), shape[1])
