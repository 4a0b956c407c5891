"""Task models over frozen vectors: padding changes nothing, mixes enter where asked to, the loss is defined.

The mix equals the formula of ELMo's paper in float64; dropped layers give their weight to the others.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ctxlm_ds.apps.downstream.features.kinds import FrozenModel, HeadSettings, InputShape, ScalarMix

SHAPE = InputShape(num_vectors=3, width=5, static_width=2)
SETTINGS = HeadSettings(hidden_size=4)


def batch(rows: int = 2) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    lengths = torch.tensor([4, 2, 3, 1][:rows])
    return {"vectors": torch.randn(rows, 4, 3, 5), "static": torch.randn(rows, 4, 2), "lengths": lengths}


@pytest.mark.parametrize("mix_at", ["input", "output", "both"])
@pytest.mark.parametrize("encoder", ["bilstm", "none"])
def test_what_is_behind_a_text_changes_nothing(mix_at: str, encoder: str) -> None:
    model = FrozenModel(SHAPE, replace(SETTINGS, mix_at=mix_at, encoder=encoder), 3, "tags").eval()
    inputs = batch()
    logits = model(**inputs)["logits"]
    assert logits.shape == (2, 4, 3) and list(model.mixes) == (["input", "output"] if mix_at == "both" else [mix_at])
    inputs["vectors"][1, 2:] = 9.0
    inputs["static"][1, 2:] = 9.0
    torch.testing.assert_close(model(**inputs)["logits"][1, :2], logits[1, :2])
    alone = model(inputs["vectors"][1:, :2], inputs["lengths"][1:], inputs["static"][1:, :2])["logits"]
    torch.testing.assert_close(alone[0], logits[1, :2])


def test_a_pair_is_compared() -> None:
    model = FrozenModel(SHAPE, replace(SETTINGS, encoder="none"), 1, "number", pairs=True).eval()
    inputs = batch(4)
    paired = {name: value.unflatten(0, (2, 2)).transpose(0, 1) for name, value in inputs.items()}
    words = torch.cat([inputs["static"], inputs["vectors"].mean(dim=2)], dim=-1)
    u = torch.stack([words[0].mean(dim=0), words[1, :2].mean(dim=0)])
    v = torch.stack([words[2, :3].mean(dim=0), words[3, 0]])
    expected = model.classifier(torch.cat([u, v, (u - v).abs(), u * v], dim=1))
    labels = torch.tensor([0.5, 2.0])
    outputs = model(**paired, labels=labels)
    torch.testing.assert_close(outputs["logits"], expected)
    torch.testing.assert_close(outputs["loss"], F.mse_loss(expected[:, 0], labels))


def test_the_penalty_is_part_of_the_loss_of_training() -> None:
    settings = replace(SETTINGS, mix_at="both", mix_l2=0.5, dropout=0.0)
    model = FrozenModel(SHAPE, settings, 3, "tags")
    labels = torch.tensor([[0, 1, 2, 0], [1, 2, -100, -100]])
    for mix in model.mixes.values():
        mix.scalars.data.copy_(torch.tensor([1.0, 0.0, -2.0]))
    losses = [model.train(training)(**batch(), labels=labels)["loss"] for training in (True, False)]
    torch.testing.assert_close(losses[0] - losses[1], torch.tensor(0.5 * 2 * 5.0))
    logits = model(**batch())["logits"]
    torch.testing.assert_close(
        losses[1], F.cross_entropy(logits.flatten(0, 1)[[0, 1, 2, 3, 4, 5]], labels.flatten()[:6])
    )


def test_a_mix_is_the_papers_formula() -> None:
    generator = np.random.default_rng(1)
    layers, scalars, gamma = generator.normal(size=(2, 3, 4, 5)), generator.normal(size=4), 1.7
    mix = ScalarMix(4).double()
    assert torch.equal(mix.weights(), torch.full((4,), 0.25, dtype=torch.float64)) and mix.gamma.item() == 1
    mix.scalars.data.copy_(torch.from_numpy(scalars))
    mix.gamma.data.fill_(gamma)
    softmax = np.exp(scalars) / np.exp(scalars).sum()
    expected = gamma * sum(weight * layers[:, :, at] for at, weight in enumerate(softmax))
    np.testing.assert_allclose(mix(torch.from_numpy(layers)).detach().numpy(), expected, rtol=1e-13)


def test_layers_are_dropped_in_training_only() -> None:
    torch.manual_seed(1)
    mix = ScalarMix(4, layer_dropout=0.5)
    drawn = torch.stack([mix.weights() for _ in range(400)])
    assert torch.allclose(drawn.sum(dim=1), torch.ones(400))
    # Of 4 layers, all are left out with probability 1/16; then none is.
    share = (drawn == 0).float().mean()
    assert abs(float(share) - (0.5 - 1 / 16)) < 0.05
    assert torch.equal(mix.eval().weights(), torch.full((4,), 0.25))
