"""The ordered list of layers, the module that runs it, and what may be switched on for each layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.kernels.bias_gelu import why_compiled_cannot_run
from ctxlm_ds.kernels.dispatch import choose_kernels
from ctxlm_ds.models.build import build_layer_list, build_model
from ctxlm_ds.models.layer_list import LayerSequence, Tensors
from ctxlm_ds.recipe.schema import KernelsConfig
from tests.encoder_batches import TERMS, random_batch, tiny_model
from tests.sections import model_section

SEQ_LENGTH = 20
LENGTHS = [[8, 5], [20], [3, 4]]
KERNELS = choose_kernels(KernelsConfig(), "cpu", torch.float32, packing=True)


def model_of(config: TransformerSection, terms: tuple[str, ...] = TERMS, **options: bool) -> LayerSequence:
    return build_model(config, terms, KERNELS, seed=3, **options)


def loss_and_gradients(model: LayerSequence, inputs: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(11)
    loss = torch.stack([output.square().mean() for output in model(inputs)]).sum()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def names_of_layer(index: int) -> set[str]:
    parts = ("attention.qkv", "attention.output", "attention_layer_norm", "mlp.up", "mlp.down", "mlp_layer_norm")
    return {f"encoder.{index}.{part}.{leaf}" for part in parts for leaf in ("weight", "bias")}


COMMON_NAMES = {
    "word_embeddings.weight", "embeddings.position_embeddings.weight", "embeddings.layer_norm.weight",
    "embeddings.layer_norm.bias", "heads.mlm_transform.weight", "heads.mlm_transform.bias",
    "heads.mlm_layer_norm.weight", "heads.mlm_layer_norm.bias", "mlm_bias.bias",
    *names_of_layer(0), *names_of_layer(1),
}  # fmt: skip
NSP_NAMES = {f"heads.{part}.{leaf}" for part in ("pooler", "nsp_classifier") for leaf in ("weight", "bias")}


@pytest.mark.parametrize(
    ("config", "terms", "names"),
    [
        (tiny_model(), TERMS, COMMON_NAMES | NSP_NAMES | {"embeddings.token_type_embeddings.weight"}),
        (tiny_model(), ("masked_lm",), COMMON_NAMES | {"embeddings.token_type_embeddings.weight"}),
        (tiny_model(family="roberta"), ("masked_lm",), COMMON_NAMES),
        (
            tiny_model(family="roberta", pre_layer_norm=True),
            ("masked_lm",),
            COMMON_NAMES | {"final_layer_norm.weight", "final_layer_norm.bias"},
        ),
    ],
)
def test_parameter_names(config: TransformerSection, terms: tuple[str, ...], names: set[str]) -> None:
    assert {name for name, _ in model_of(config, terms).named_parameters()} == names


def test_the_word_embedding_is_one_module_called_twice_through_forward() -> None:
    model = model_of(tiny_model())
    calls: list[bool] = []
    model.word_embeddings.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs.get("decode", False)), with_kwargs=True
    )
    model(random_batch(LENGTHS, tiny_model(), SEQ_LENGTH).model_inputs())
    assert calls == [False, True]


def test_every_layer_drops_what_no_later_layer_needs_and_every_floating_tensor_gets_a_gradient() -> None:
    """What a pipeline needs of the tuples between any two layers."""
    config = tiny_model(pre_layer_norm=True)
    batch = random_batch(LENGTHS, config, SEQ_LENGTH)
    tensors = batch.model_inputs()
    built: dict[str, torch.nn.Module] = {}
    crossed: list[list[Tensor]] = []
    widths = [len(tensors)]
    for description in build_layer_list(config, TERMS, KERNELS):
        module = built.setdefault(description.tie_key or description.name, description.build())
        tensors = module(tensors, **description.call_kwargs)
        assert isinstance(tensors, tuple)
        widths.append(len(tensors))
        crossed.append([tensor for tensor in tensors if tensor.is_floating_point()])
        for tensor in crossed[-1]:
            tensor.retain_grad()
    assert widths == [7, 7, 5, 5, 5, 5, 2, 2, 2]
    torch.stack([tensor.sum() for tensor in tensors]).sum().backward()
    assert all(tensor.grad is not None for between in crossed for tensor in between)
    assert [tuple(tensor.shape) for tensor in tensors] == [(3, 6, 61), (3, 2, 2)]


def test_shapes_do_not_depend_on_the_contents() -> None:
    config = tiny_model()
    model = model_of(config).eval()
    for lengths in ([[20], [20], [20]], [[1], [], [2]]):
        outputs = model(random_batch(lengths, config, SEQ_LENGTH).model_inputs())
        assert [tuple(output.shape) for output in outputs] == [(3, 6, 61), (3, 1, 2)]
        assert all(output.isfinite().all() for output in outputs)


def test_dropout_in_training_and_not_in_evaluation() -> None:
    config = tiny_model(hidden_dropout=0.2)
    inputs = random_batch(LENGTHS, config, SEQ_LENGTH).model_inputs()
    model = model_of(config)
    assert not torch.equal(model.train()(inputs)[0], model(inputs)[0])
    assert torch.equal(model.eval()(inputs)[0], model(inputs)[0])


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_attention_dropout_in_training_and_not_in_evaluation(kernel: str) -> None:
    config = tiny_model(attention_dropout=0.2)
    kernels = choose_kernels(KernelsConfig.model_validate({"attention": kernel}), "cpu", torch.float32, packing=True)
    model = build_model(config, TERMS, kernels, seed=3)
    inputs = random_batch(LENGTHS, config, SEQ_LENGTH).model_inputs()
    assert not torch.equal(model.train()(inputs)[0], model(inputs)[0])
    assert torch.equal(model.eval()(inputs)[0], model(inputs)[0])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_activation_checkpointing_changes_neither_loss_nor_gradients(dropout: float) -> None:
    config = tiny_model(hidden_dropout=dropout, attention_dropout=dropout)
    inputs = random_batch(LENGTHS, config, SEQ_LENGTH).model_inputs()
    loss, gradients = loss_and_gradients(model_of(config), inputs)
    again, recomputed = loss_and_gradients(model_of(config, activation_checkpointing=True), inputs)
    torch.testing.assert_close(again, loss, rtol=0, atol=0)
    assert recomputed.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-6, atol=1e-7, msg=name)


def test_activation_checkpointing_keeps_less() -> None:
    config = tiny_model(num_layers=6)
    inputs = random_batch(LENGTHS, config, SEQ_LENGTH).model_inputs()

    def kept_elements(**options: bool) -> int:
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
            return tensor

        model = model_of(config, **options)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(inputs)
        return sum(kept.values()) - sum(parameter.numel() for parameter in model.parameters())

    assert kept_elements(activation_checkpointing=True) < 0.5 * kept_elements()


@pytest.mark.skipif(why_compiled_cannot_run("cpu") is not None, reason="needs a C++ compiler")
def test_compiled_layers_give_the_same_loss_and_gradients_under_the_same_names() -> None:
    config = tiny_model(num_layers=1)
    inputs = random_batch(LENGTHS, config, SEQ_LENGTH).model_inputs()
    plain, compiled = model_of(config), model_of(config, compile_layers=True)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    loss, gradients = loss_and_gradients(plain, inputs)
    again, compiled_gradients = loss_and_gradients(compiled, inputs)
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(compiled_gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_bf16_is_finite_and_near_fp32() -> None:
    config = tiny_model()
    inputs = random_batch(LENGTHS, config, SEQ_LENGTH).model_inputs()
    kernels = choose_kernels(KernelsConfig(), "cpu", torch.bfloat16, packing=True)
    exact, gradients = loss_and_gradients(model_of(config), inputs)
    loss, rounded = loss_and_gradients(build_model(config, TERMS, kernels, seed=3).to(torch.bfloat16), inputs)
    torch.testing.assert_close(loss.float(), exact, rtol=0.05, atol=0)
    assert all(gradient.dtype == torch.bfloat16 and gradient.isfinite().all() for gradient in rounded.values())
    for name, gradient in gradients.items():
        if not name.endswith("qkv.bias"):  # its key third is 0 but for rounding
            cosine = torch.nn.functional.cosine_similarity(rounded[name].float().flatten(), gradient.flatten(), dim=0)
            assert cosine > 0.98, name


def test_a_copy_is_independent() -> None:
    config = tiny_model()
    inputs = random_batch(LENGTHS, config, SEQ_LENGTH).model_inputs()
    model = model_of(config).eval()
    before = model(inputs)[0]
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.word_embeddings.weight.zero_()
    assert torch.equal(model(inputs)[0], before)
    assert not torch.equal(copied(inputs)[0], before)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (model_section(), r"model\.vocab_size is not set"),
        (model_section(vocab_size=10, hidden_size=30, num_attention_heads=4), "4 heads do not divide .* 30"),
    ],
)
def test_impossible_shapes(config: TransformerSection, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_layer_list(config, TERMS, KERNELS)
