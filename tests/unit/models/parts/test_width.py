"""Maximal-update parametrisation: Yang 2022's table 8, and its coordinate check over widths (appendix D.1)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ctxlm_ds.models.program import Program, plain_program
from ctxlm_ds.parallel.parameters import Constant, Normal
from ctxlm_ds.recipe import choices
from ctxlm_ds.training.optimizers.build import parameter_groups
from tests.encoder_batches import tiny_model

FAMILIES = {"gpt2": "logits", "llama": "logits", "modernbert": "predicted_logits"}
BASE, WIDTHS, STEPS, RATE, VOCAB, LENGTH = 64, (64, 128, 256, 512), 4, 3e-3, 61, 16


def program_of(family: str, width: int, base: int | None) -> Program:
    model = tiny_model(
        family=family, hidden_size=width, intermediate_size=2 * width, num_attention_heads=width // 16,
        initializer_range=1 / math.sqrt(BASE), vocab_size=VOCAB, base_width=base,
    )  # fmt: skip
    return plain_program(model, (FAMILIES[family],))


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_values_and_rates_of_four_times_the_width(family: str) -> None:
    facts, plain = program_of(family, 256, BASE).facts, program_of(family, 256, None).facts
    output = "heads.mlm_layer_norm." if family == "modernbert" else "final_layer_norm."
    seen = set()
    for name, own in facts.items():
        before = plain[name].init
        if name.startswith(output):
            assert isinstance(before, Constant) and own.init == Constant(before.value / 4) and own.rate_factor == 0.25
        elif own.matrix or name == "heads.mlm_transform.weight":
            assert isinstance(own.init, Normal) and isinstance(before, Normal) and own.rate_factor == 0.25
            assert own.init.standard_deviation == pytest.approx(before.standard_deviation / 2)
        else:
            assert own == plain[name]
            continue
        seen.add(name)
    assert len(seen) == {"gpt2": 10, "llama": 9, "modernbert": 10}[family]
    assert program_of(family, BASE, BASE).facts == program_of(family, BASE, None).facts


def test_parameters_of_one_rate_share_a_group() -> None:
    program = program_of("gpt2", 256, BASE)
    module = program.module(1)
    adamw, muon = (choices.OPTIMIZER.make(name=name) for name in ("adamw", "muon"))
    for settings, expected in (
        (adamw, {("weights", 1.0), ("weights", 0.25), ("rest", 1.0), ("rest", 0.25)}),
        (muon, {("matrices", 1.0), ("weights", 1.0), ("rest", 1.0), ("rest", 0.25)}),
    ):
        groups = parameter_groups(module.named_parameters(), program.facts, settings)
        found = {
            ("matrices" if group.get("matrices") else "weights" if group["weight_decay"] else "rest", group["moves"])
            for group in groups
        }
        assert found == expected and len(groups) == len(expected)
        assert sum(len(group["params"]) for group in groups) == len(list(module.parameters()))


def fields(seed: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (8, LENGTH), generator=drawn)
    places = torch.arange(LENGTH).expand(8, -1)
    starts = torch.tensor([[0, LENGTH]]).expand(8, -1)
    labels = torch.randint(VOCAB, (8, LENGTH), generator=drawn)
    return {"input_ids": ids, "position_ids": places, "sequence_ids": torch.ones_like(ids), "sequence_starts": starts,
            "prediction_positions": places, "labels": labels}  # fmt: skip


def change_of_logits(family: str, width: int, base: int | None) -> float:
    """Train with AdamW on one batch; return the root mean square of what the logits have changed."""
    program = program_of(family, width, base)
    module, batch, settings = program.module(1), fields(0), choices.OPTIMIZER.make(learning_rate=RATE, weight_decay=0.0)
    groups = parameter_groups(module.named_parameters(), program.facts, settings)
    optimizer = torch.optim.AdamW([{**group, "lr": RATE * group["moves"]} for group in groups], eps=1e-12)
    start = None
    for _ in range(STEPS):
        logits = module.run(batch)[FAMILIES[family]].flatten(0, 1)
        start = logits.detach() if start is None else start
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, batch["labels"].flatten()).backward()
        optimizer.step()
    return float((module.run(batch)[FAMILIES[family]].flatten(0, 1) - start).pow(2).mean().sqrt().detach())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_change_as_much_at_every_width(family: str) -> None:
    """Without base_width they change more the wider the model is."""
    exponents = []
    for base in (BASE, None):
        changes = [change_of_logits(family, width, base) for width in WIDTHS]
        exponents.append(np.polyfit(np.log(WIDTHS), np.log(changes), 1)[0])
    assert -0.35 < exponents[0] < 0.1 and exponents[1] > 0.5, exponents
