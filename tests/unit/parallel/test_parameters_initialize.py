"""Initial values: the published distribution, and the same whatever else is built."""

from __future__ import annotations

import math

import pytest
import torch

from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerSequence, ModelBuild
from ctxlm_ds.models.program import build_program, plain_program
from ctxlm_ds.parallel.parameters import Normal, Uniform, initial_value, initialize_parameters
from ctxlm_ds.recipe.sections import ModelSection
from tests.encoder_batches import OUTPUTS, tiny_model

BUILD = ModelBuild(OUTPUTS, KernelSet({}, "cpu", torch.float32))
INIT = Normal(0.2)


def model_of(config: ModelSection) -> LayerSequence:
    return build_program(config, BUILD).module(1)


def test_distribution() -> None:
    value = initial_value("encoder.0.mlp.up.weight", (300, 400), Normal(0.02), seed=1)
    assert value.dtype == torch.float32 and value.device.type == "cpu"
    assert abs(value.mean().item()) < 4 * 0.02 / 120_000**0.5
    assert value.std().item() == pytest.approx(0.02, rel=0.01)
    assert (value.abs() > 0.04).float().mean().item() == pytest.approx(0.0455, abs=0.004)


def test_truncated_distribution() -> None:
    """TensorFlow's truncated_normal_initializer: nothing beyond two deviations, all else as a normal distribution."""
    deviation, count = 0.02, 120_000
    init = Normal(deviation, truncated=True)
    value = initial_value("encoder.0.mlp.up.weight", (300, 400), init, seed=1).double().flatten() / deviation
    assert value.abs().max().item() <= 2.0 + 1e-6
    assert value.max().item() > 1.999 and value.min().item() < -1.999
    density = math.exp(-2.0) / math.sqrt(2 * math.pi)
    inside = math.erf(math.sqrt(2.0))
    expected = math.sqrt(1 - 4 * density / inside)  # 0.8796
    assert abs(value.mean().item()) < 4 * expected / count**0.5
    assert value.std().item() == pytest.approx(expected, rel=0.005)
    # Kolmogorov and Smirnov's distance to the distribution function of a normal one cut at two deviations.
    below = (torch.special.ndtr(value.sort().values) - torch.special.ndtr(torch.tensor(-2.0))) / inside
    assert (below - (torch.arange(count) + 0.5) / count).abs().max().item() < 1.95 / count**0.5
    again, other = (initial_value("encoder.0.mlp.up.weight", (300, 400), init, seed) for seed in (1, 2))
    assert torch.equal(again.double().flatten() / deviation, value) and not torch.equal(again, other)


def test_a_recipe_chooses_the_truncated_distribution() -> None:
    """Matrices and tables are truncated; biases and norms stay constants."""
    truncated, normal = (
        plain_program(tiny_model(initializer=name), OUTPUTS) for name in ("truncated_normal", "normal")
    )
    for name, facts in truncated.facts.items():
        if isinstance(facts.init, Normal):
            assert facts.init.truncated and not normal.facts[name].init.truncated, name
        else:
            assert facts.init == normal.facts[name].init, name


def test_gpt2_narrows_what_ends_on_the_residual_stream() -> None:
    """Radford 2019, section 2.3: by one over the root of the number of residual layers, two a transformer layer."""
    settings = {"num_layers": 8, "initializer_range": 0.02, "hidden_size": 300, "intermediate_size": 400}
    gpt2, gpt1 = (plain_program(tiny_model(family=name, **settings), ("logits",)) for name in ("gpt2", "gpt1"))

    def deviation(name: str) -> float:
        return initial_value(name, gpt2.shapes[name], gpt2.facts[name].init, seed=1).std().item()

    for name, expected in (
        ("decoder.3.attention.output.weight", 0.005),
        ("decoder.3.mlp.down.weight", 0.005),
        ("decoder.3.mlp.up.weight", 0.02),
        ("decoder.3.attention.qkv.weight", 0.02),
        ("word_embeddings.weight", 0.02),
    ):
        assert deviation(name) == pytest.approx(expected, rel=0.02), name
    assert gpt1.facts["decoder.3.mlp.down.weight"].init == gpt1.facts["decoder.3.mlp.up.weight"].init == Normal(0.02)


def test_values_depend_on_seed_and_name_alone() -> None:
    torch.manual_seed(0)
    first = initial_value("word_embeddings.weight", (61, 32), INIT, seed=1)
    torch.manual_seed(99)
    assert torch.equal(initial_value("word_embeddings.weight", (61, 32), INIT, seed=1), first)
    assert not torch.equal(initial_value("word_embeddings.weight", (61, 32), INIT, seed=2), first)
    assert not torch.equal(initial_value("embeddings.position_embeddings.weight", (61, 32), INIT, seed=1), first)
    deep, shallow = (model_of(tiny_model(num_layers=layers)).state_dict() for layers in (3, 2))
    assert torch.equal(shallow["word_embeddings.weight"], first)
    for name, value in shallow.items():
        assert torch.equal(deep[name], value), name


def test_a_default_device_or_type_changes_nothing() -> None:
    expected = initial_value("encoder.0.mlp.up.weight", (64, 32), INIT, seed=1)
    with torch.device("meta"):
        assert torch.equal(initial_value("encoder.0.mlp.up.weight", (64, 32), INIT, seed=1), expected)
    model = model_of(tiny_model()).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    initialize_parameters(model, seed=1)
    assert torch.equal(model.state_dict()["encoder.0.mlp.up.weight"], expected.to(torch.bfloat16))


def test_on_meta_there_are_shapes_alone() -> None:
    with torch.device("meta"):
        model = model_of(tiny_model(hidden_size=4096, num_layers=48, vocab_size=250_000))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_blocks_of_rows_have_separate_deviations() -> None:
    plain = initial_value("w", (6, 50), Normal(0.5), 1)
    scaled = initial_value("w", (6, 50), Normal(0.5, row_factors=(0.1, 1.0, 2.0)), 1)
    assert torch.equal(scaled, plain * torch.tensor([0.1, 0.1, 1.0, 1.0, 2.0, 2.0])[:, None])


def test_a_uniform_distribution_has_its_limits() -> None:
    value, again = (initial_value("characters.table.weight", (300, 400), Uniform(0.05), seed) for seed in (1, 1))
    assert torch.equal(value, again) and value.abs().max() <= 0.05
    assert value.std().item() == pytest.approx(0.1 / 12**0.5, rel=0.01) and value.mean().abs() < 1e-3
