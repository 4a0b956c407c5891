"""The meter of one layer: kept bytes are those that autograd saves, FLOPs are what torch counts."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ctxlm_ds.models.meter import CPU
from ctxlm_ds.registry import FAMILIES
from ctxlm_ds.training.measure import MeasuredModel, measure, training_flops_per_row
from tests.unit.training.test_measure import ROWS, RealRun, config_of


def planned_bytes(measured: MeasuredModel, recompute: bool = False) -> int:
    layers = [*(measured.recomputed if recompute else measured.layers), measured.loss]
    fields = {name for layer in layers for name in layer.fields}
    return sum(layer.at(ROWS).kept for layer in layers) + ROWS * sum(measured.field_bytes[name] for name in fields)


SHARED_BIAS = {"family": "t5", "attention_dropout": 0.0}
"""T5's bias, which learns without dropout and which the layers share, so that a little of it is counted twice."""
CASES: list[dict[str, Any]] = [
    {},
    SHARED_BIAS,
    {"num_layers": 3, "hidden_size": 64, "intermediate_size": 256},
    {"hidden_dropout": 0.0, "hidden_activation": "relu"},
    {"pre_layer_norm": True, "hidden_activation": "gelu_tanh"},
    {"attention_dropout": 0.1},
    {"attention_dropout": 0.1, "kernels": {"attention": "reference", "layer_norm": "reference"}},
    {"data": {"packing": True}},
    {"family": "roberta", "training": {"precision": "bf16"}},
    {"family": "gpt2"},
    {"family": "gpt1", "data": {"reset_at_documents": False}},
    {"family": "gpt2", "attention_dropout": 0.1},
    {"family": "gpt2", "kernels": {"cross_entropy": "chunked"}},
    {"kernels": {"cross_entropy": "chunked"}, "training": {"precision": "bf16"}},
]


@pytest.mark.parametrize("changes", CASES)
def test_kept_activations_are_the_saved_ones(changes: dict[str, Any]) -> None:
    config, error = config_of(**changes), 0.05 if changes == SHARED_BIAS else 0.02
    assert planned_bytes(measure(config, platform=CPU)) == pytest.approx(RealRun(config).kept_bytes(), rel=error)


def test_recomputation_keeps_the_input_of_each_layer() -> None:
    config = config_of(training={"activation_checkpointing": True})
    real = RealRun(config)
    inputs: dict[int, Tensor] = {}
    for layer in real.model.get_submodule("encoder").children():
        layer.register_forward_pre_hook(
            lambda _, given: inputs.update({given[0].untyped_storage().data_ptr(): given[0]})
        )
    real.kept_bytes()
    kept = sum(tensor.untyped_storage().nbytes() for tensor in (real.kept | inputs).values())
    assert len(inputs) == 4
    measured = measure(config, platform=CPU)
    assert planned_bytes(measured, recompute=True) == pytest.approx(kept, rel=0.02)
    assert planned_bytes(measured, recompute=True) < 0.5 * planned_bytes(measured)


ALIKE = ("distilbert", "gpt1", "mbart", "megatron_bert", "roberta", "unilm", "xlm_roberta")
"""Families with the layers of others; the contract counts the forward pass of each."""


@pytest.mark.long
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.soak] * (name in ALIKE)) for name in FAMILIES.shipped_names()]
)
def test_flops_are_what_torch_counts(family: str) -> None:
    data = {"seq_length": 2} if family == "elmo" else {}  # each step of an LSTM takes many operations
    config = config_of(family, data=data, kernels={"attention": "reference"})
    real = RealRun(config)
    with FlopCounterMode(display=False) as forward:
        loss = real.loss()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward.get_total_flops() == ROWS * sum(layer.at(1).flops for layer in measure(config).layers)
    assert forward.get_total_flops() + backward.get_total_flops() == ROWS * training_flops_per_row(measure(config))
    fused = config_of(family, data=data)
    ours, others = (training_flops_per_row(measure(one)) for one in (config, fused))
    assert ours == others, "fused attention counts as much"
