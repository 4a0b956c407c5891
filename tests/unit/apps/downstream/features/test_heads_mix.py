"""The mix equals the formula of ELMo's paper in float64; dropped layers give their weight to the others."""

from __future__ import annotations

import numpy as np
import torch

from ctxlm_ds.apps.downstream.features.heads import ScalarMix


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
    np.testing.assert_allclose(mix.penalty().item(), (scalars**2).sum())


def test_layers_are_dropped_in_training_only() -> None:
    torch.manual_seed(1)
    mix = ScalarMix(4, layer_dropout=0.5)
    drawn = torch.stack([mix.weights() for _ in range(400)])
    assert torch.allclose(drawn.sum(dim=1), torch.ones(400))
    # Of 4 layers, all are left out with probability 1/16; then none is.
    share = (drawn == 0).float().mean()
    assert abs(float(share) - (0.5 - 1 / 16)) < 0.05
    assert torch.equal(mix.eval().weights(), torch.full((4,), 0.25))
