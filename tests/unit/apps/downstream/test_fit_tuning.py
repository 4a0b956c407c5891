"""What is trained: the last layers, the head, slower below, LoRA, and gradual unfreezing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctxlm_ds.apps.downstream.fit import GradualUnfreezing, Tuning, apply_tuning, depths, find_blocks, layered_optimizer
from ctxlm_ds.errors import ConfigError
from tests.downstream_models import write_bert


@pytest.fixture
def model(tmp_path: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(write_bert(tmp_path))


def trained(model: Any) -> set[int]:
    return {depth for name, depth in depths(model).items() if model.get_parameter(name).requires_grad}


@pytest.mark.parametrize("family", ["albert", "gpt2", "t5", "distilbert", "electra", "llama", "modernbert", "bart"])
def test_blocks_of_other_families_are_found(family: str) -> None:
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(family)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    expected = {"albert": 1, "t5": 12, "bart": 24}.get(family, config.num_hidden_layers)
    assert len(find_blocks(model)) == expected


@pytest.mark.parametrize(("layers", "expected"), [(0, {4}), (2, {2, 3, 4}), (None, {0, 1, 2, 3, 4})])
def test_the_last_layers_are_trained(model: Any, layers: int | None, expected: set[int]) -> None:
    assert trained(apply_tuning(model, Tuning(layers=layers))) == expected


def test_too_many_layers_and_two_ways_are_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="the model has 3 layers"):
        apply_tuning(model, Tuning(layers=4))
    with pytest.raises(ConfigError, match="exclude each other"):
        Tuning(layers=1, lora_rank=2)
    with pytest.raises(ConfigError, match="exclude each other"):
        Tuning(lora_rank=2, layer_decay=0.9)
    with pytest.raises(ConfigError, match="layer-decay"):
        Tuning(layer_decay=1.5)


def test_rates_fall_with_depth_and_matrices_decay(model: Any) -> None:
    arguments = SimpleNamespace(
        learning_rate=1e-3, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.98, adam_epsilon=1e-6
    )
    groups = layered_optimizer(model, arguments, 0.5).param_groups
    rates = {id(one): group["lr"] for group in groups for one in group["params"]}
    decay = {id(one): group["weight_decay"] for group in groups for one in group["params"]}
    assert len(rates) == len(list(model.parameters()))
    assert rates[id(model.classifier.weight)] == 1e-3
    assert rates[id(model.bert.encoder.layer[2].output.dense.weight)] == pytest.approx(1e-3 / 2)
    assert rates[id(model.bert.embeddings.word_embeddings.weight)] == pytest.approx(1e-3 / 16)
    assert decay[id(model.classifier.bias)] == decay[id(model.bert.embeddings.LayerNorm.weight)] == 0
    assert decay[id(model.classifier.weight)] == 0.1


def test_lora_trains_its_matrices_and_the_head_and_merges(model: Any) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wrapped = apply_tuning(model, Tuning(lora_rank=2))
    names = {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or "classifier" in name or "pooler" in name for name in names)
    assert sum("lora_A" in name for name in names) == 3 * 6
    merged = wrapped.merge_and_unload()
    assert all(torch.equal(value, before[name]) for name, value in merged.state_dict().items())


def test_one_more_layer_is_trained_each_epoch(model: Any) -> None:
    callback = GradualUnfreezing()
    for epoch, expected in ((0.0, {4}), (1.0, {3, 4}), (3.0, {1, 2, 3, 4}), (4.0, {0, 1, 2, 3, 4})):
        callback.on_epoch_begin(None, SimpleNamespace(epoch=epoch), None, model=model)
        assert trained(model) == expected


def test_the_head_of_a_model_without_a_base_is_found() -> None:
    from transformers import AutoConfig, AutoModelForQuestionAnswering

    config = AutoConfig.for_model("t5", num_layers=3, num_decoder_layers=2, d_model=16, d_ff=16, d_kv=8, num_heads=2)
    with torch.device("meta"):
        model = AutoModelForQuestionAnswering.from_config(config)
    assert len(find_blocks(model)) == 5
    places = depths(model)
    assert places["qa_outputs.weight"] == 6 and places["shared.weight"] == 0
