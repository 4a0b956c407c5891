"""Initial values: the published distribution, and the same whatever else is built."""

from __future__ import annotations

import pytest
import torch

from ctxlm_ds.kernels.dispatch import choose_kernels
from ctxlm_ds.models.build import build_model
from ctxlm_ds.models.initialize import initial_value, initialize_parameters
from ctxlm_ds.recipe.schema import KernelsConfig
from tests.encoder_batches import TERMS, tiny_model

KERNELS = choose_kernels(KernelsConfig(), "cpu", torch.float32, packing=False)


def test_distribution() -> None:
    config = tiny_model(initializer_range=0.02)
    value = initial_value("encoder.0.mlp.up.weight", (300, 400), config, seed=1)
    assert value.dtype == torch.float32 and value.device.type == "cpu"
    assert abs(value.mean().item()) < 4 * 0.02 / 120_000**0.5
    assert value.std().item() == pytest.approx(0.02, rel=0.01)
    assert (value.abs() > 0.04).float().mean().item() == pytest.approx(0.0455, abs=0.004)


def test_gpt2_narrows_what_ends_on_the_residual_stream() -> None:
    """Radford 2019, section 2.3: by one over the root of the number of residual layers, two a transformer layer."""
    config = tiny_model(family="gpt2", num_layers=8, initializer_range=0.02)
    for name, expected in (
        ("decoder.3.attention.output.weight", 0.005),
        ("decoder.3.mlp.down.weight", 0.005),
        ("decoder.3.mlp.up.weight", 0.02),
        ("decoder.3.attention.qkv.weight", 0.02),
        ("word_embeddings.weight", 0.02),
    ):
        assert initial_value(name, (300, 400), config, seed=1).std().item() == pytest.approx(expected, rel=0.01), name
    gpt1 = config.model_copy(update={"family": "gpt1"})
    value = initial_value("decoder.3.mlp.down.weight", (300, 400), gpt1, seed=1)
    assert value.std().item() == pytest.approx(0.02, rel=0.01)


def test_every_parameter_of_a_model() -> None:
    for name, parameter in build_model(tiny_model(), TERMS, KERNELS, seed=1).named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "layer_norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.2, rel=0.2), name
            assert abs(parameter.mean().item()) < 0.1, name


def test_values_depend_on_seed_and_name_alone() -> None:
    config = tiny_model()
    torch.manual_seed(0)
    first = initial_value("word_embeddings.weight", (61, 32), config, seed=1)
    torch.manual_seed(99)
    assert torch.equal(initial_value("word_embeddings.weight", (61, 32), config, seed=1), first)
    assert not torch.equal(initial_value("word_embeddings.weight", (61, 32), config, seed=2), first)
    assert not torch.equal(initial_value("embeddings.position_embeddings.weight", (61, 32), config, seed=1), first)
    deep = build_model(tiny_model(num_layers=3), TERMS, KERNELS, seed=1).state_dict()
    for name, value in build_model(tiny_model(), TERMS, KERNELS, seed=1).state_dict().items():
        assert torch.equal(deep[name], value), name


def test_a_default_device_or_type_changes_nothing() -> None:
    config = tiny_model()
    expected = initial_value("encoder.0.mlp.up.weight", (64, 32), config, seed=1)
    with torch.device("meta"):
        assert torch.equal(initial_value("encoder.0.mlp.up.weight", (64, 32), config, seed=1), expected)
    model = build_model(config, TERMS, KERNELS, seed=1).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    initialize_parameters(model, config, seed=1)
    assert torch.equal(model.state_dict()["encoder.0.mlp.up.weight"], expected.to(torch.bfloat16))


def test_on_meta_there_are_shapes_alone() -> None:
    with torch.device("meta"):
        model = build_model(tiny_model(hidden_size=4096, num_layers=48, vocab_size=250_000), TERMS, KERNELS, seed=1)
    assert all(parameter.is_meta for parameter in model.parameters())
