"""Activation memory against what autograd really saves: unique storages under saved_tensors_hooks, parameters aside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ctxlm_ds.kernels.attention import SdpaAttention
from ctxlm_ds.kernels.bias_gelu import TorchBiasGelu
from ctxlm_ds.kernels.dispatch import choose_kernels
from ctxlm_ds.kernels.linear import torch_linear
from ctxlm_ds.models.build import build_model
from ctxlm_ds.models.layer_list import LayerSequence
from ctxlm_ds.parallel.cross_entropy import classification_sums
from ctxlm_ds.planning.activations import CPU, CUDA, Platform, activation_bytes
from ctxlm_ds.planning.layouts import Layout
from ctxlm_ds.planning.shapes import objective_terms
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.training.stage_timing import synthetic_inputs

CPU_WITH_SCORES = Platform(keeps_scores=True, mask_bytes=None)
TOLERANCE = 0.10


def config_of(family: str = "bert", rows: int = 4, length: int = 64, **changes: Any) -> RunConfig:
    """`changes` are settings of the model, or whole sections."""
    objective = {"bert": "masked_lm_nsp", "roberta": "masked_lm"}.get(family, "causal_lm")
    sections = {key: changes.pop(key) for key in ("data", "kernels", "training") if key in changes}
    model = {
        "family": family, "vocab_size": 500, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 256, "max_position_embeddings": length, "hidden_dropout": 0.1, "attention_dropout": 0.0,
    }  # fmt: skip
    data = {"seq_length": length}
    data |= {"sample_format": "blocks", "reset_at_documents": False} if objective == "causal_lm" else {}
    training = {"micro_batch_size": rows, "global_batch_size": rows, "precision": "fp32"}
    return RunConfig.model_validate(
        {
            "model": model | changes,
            "data": data | sections.get("data", {}),
            "objective": {"name": objective},
            "training": training | sections.get("training", {}),
            "kernels": sections.get("kernels", {}),
        }
    )


def build(config: RunConfig, **kernel_changes: Any) -> LayerSequence:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.training.precision]
    kernels = choose_kernels(config.kernels, "cpu", dtype, config.data.shares_rows, causal=config.model.is_decoder)
    kernels = replace(kernels, **kernel_changes)
    recompute = config.training.activation_checkpointing
    model = build_model(config.model, objective_terms(config), kernels, 0, recompute).to(dtype)
    return model.train()


class SavedStorages:
    """Bytes of the distinct storages that a forward pass keeps, without parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.kept: dict[int, torch.Tensor] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in self._parameters:
            self.kept[pointer] = tensor
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.kept.values())


def forward(config: RunConfig, model: LayerSequence) -> torch.Tensor:
    outputs = model(synthetic_inputs(config, torch.device("cpu")))
    losses = [classification_sums(o, torch.zeros(o.shape[:-1], dtype=torch.long))[0] for o in outputs]
    return torch.stack(losses).sum()


def measured(config: RunConfig, **kernel_changes: Any) -> int:
    model = build(config, **kernel_changes)
    saved = SavedStorages(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        loss = forward(config, model)
    assert loss.requires_grad
    return saved.num_bytes


def predicted(config: RunConfig, platform: Platform = CPU) -> int:
    sizes = activation_bytes(config, Layout(1, micro_batch_size=config.training.micro_batch_size), platform)
    return config.model.num_layers * sizes.layer + sizes.embeddings + sizes.heads


CASES: list[tuple[dict[str, Any], Platform]] = [
    ({}, CPU),
    ({"num_layers": 4, "hidden_size": 128, "intermediate_size": 512, "length": 128, "rows": 2}, CPU),
    ({"hidden_dropout": 0.0, "num_layers": 3, "rows": 3}, CPU),
    ({"hidden_activation": "relu"}, CPU),
    ({"pre_layer_norm": True, "hidden_activation": "gelu_tanh"}, CPU),
    ({"family": "roberta", "hidden_size": 96, "num_attention_heads": 2, "intermediate_size": 200}, CPU),
    ({"family": "roberta", "num_layers": 5, "length": 32, "rows": 7}, CPU),
    ({"attention_dropout": 0.1}, CPU_WITH_SCORES),
    ({"family": "roberta", "attention_dropout": 0.1, "pre_layer_norm": True}, CPU_WITH_SCORES),
    ({"attention_dropout": 0.1, "kernels": {"attention": "reference"}}, CPU_WITH_SCORES),
    ({"kernels": {"attention": "reference"}}, CPU_WITH_SCORES),
    ({"data": {"packing": True}}, CPU),
    ({"family": "gpt2"}, CPU),
    ({"family": "gpt1", "num_layers": 3}, CPU),
    ({"family": "gpt2", "attention_dropout": 0.1, "rows": 2}, CPU_WITH_SCORES),
]


@pytest.mark.parametrize(("changes", "platform"), CASES)
def test_kept_activations_agree_with_saved_tensors(changes: dict[str, Any], platform: Platform) -> None:
    config = config_of(**changes)
    real = measured(config)
    assert abs(predicted(config, platform) - real) < TOLERANCE * real


def test_in_bf16_activations_are_half_as_large_but_for_the_loss() -> None:
    """With the plain bf16 kernels of a GPU, whatever the CPU at hand would rather compute in fp32."""
    config = config_of(training={"precision": "bf16"})
    real = measured(config, attention=SdpaAttention(False), linear=torch_linear, bias_gelu=TorchBiasGelu())
    assert abs(predicted(config) - real) < TOLERANCE * real
    assert real < 0.75 * measured(config_of())


def test_recomputation_keeps_the_input_of_each_layer() -> None:
    """Checkpointed layers save nothing by hooks; their inputs are taken where the layers are called."""
    config = config_of(num_layers=4, training={"activation_checkpointing": True})
    model = build(config)
    inputs: dict[int, int] = {}
    for layer in model.get_submodule("encoder").children():
        layer.register_forward_pre_hook(
            lambda _, arguments: inputs.update(
                {arguments[0][0].untyped_storage().data_ptr(): arguments[0][0].untyped_storage().nbytes()}
            )
        )
    saved = SavedStorages(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        loss = forward(config, model)
    real = saved.num_bytes + sum(inputs.values())
    sizes = activation_bytes(config, Layout(1, micro_batch_size=4, recompute=True), CPU)
    expected = 4 * sizes.layer_input + sizes.embeddings + sizes.heads
    assert len(inputs) == 4
    assert loss.requires_grad
    assert abs(expected - real) < TOLERANCE * real


def test_tensor_and_sequence_parallelism_divide_what_they_split() -> None:
    """Korthikanti 2022, table 2, in 16 bits with f = 4h, dropout and fused attention: 34 T·h whole, of which the
    products' 24 are divided by tensor parallelism, all by sequence parallelism.
    """
    config = config_of(training={"precision": "bf16"}, hidden_size=512, intermediate_size=2048)
    unit = 4 * 64 * 512

    def units(layout: Layout) -> float:
        return activation_bytes(config, layout, CUDA).layer / unit

    assert units(Layout(1, micro_batch_size=4)) == pytest.approx(34, rel=0.01)
    assert units(Layout(1, 4, micro_batch_size=4)) == pytest.approx(10 + 24 / 4, rel=0.01)
    assert units(Layout(1, 4, micro_batch_size=4, sequence_parallel=True)) == pytest.approx(34 / 4, rel=0.01)
