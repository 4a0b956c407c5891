"""LLaMA's layers beside LlamaForCausalLM: each scaling, tied and untied, any number of heads of keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from ctxlm_ds.export.hf_config import to_hf_config
from ctxlm_ds.export.huggingface import export_of
from ctxlm_ds.families.llama.config import LlamaSection
from ctxlm_ds.models.program import plain_program

OUTPUTS = ("logits",)
SHAPE = {
    "vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "one head of keys per query head": {"num_key_value_heads": None},
    "one head of keys": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "linear": {"rotary_scaling": "linear", "rotary_scaling_factor": 2.0},
    "llama3": {"rotary_scaling": "llama3", "rotary_scaling_factor": 8.0, "rotary_original_length": 32},
    "gelu_tanh": {"hidden_activation": "gelu_tanh", "rotary_base": 500_000.0},
}


class Ids:
    """Ids of special tokens."""

    pad_id, cls_id, sep_id = 0, 1, 2


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str) -> None:
    model = LlamaSection(**{**SHAPE, **CASES[name]})
    export = export_of("llama")
    key_map = export.key_map(model, OUTPUTS, 0)
    theirs = LlamaForCausalLM(to_hf_config(export, model, key_map.hf_class, Ids(), "fp32")).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        ours, values = plain_program(model, OUTPUTS).module().eval(), theirs.state_dict()
        for row in key_map.rows:
            ours.get_parameter(dict(_places(ours))[row.ours]).copy_(row.to_ours(values.__getitem__))
        ids = torch.randint(3, 61, (2, 64), generator=generator)
        fields = {
            "input_ids": ids, "position_ids": torch.arange(64).expand(2, 64), "sequence_ids": torch.ones_like(ids),
            "sequence_starts": torch.tensor([[0, 64], [0, 64]]),
        }  # fmt: skip
        torch.testing.assert_close(ours.run(fields)["logits"], theirs(ids).logits, rtol=1e-4, atol=1e-4)


def _places(module: Any) -> list[tuple[str, str]]:
    """Full names of parameters, and their names as torch has them."""
    plain = {id(parameter): name for name, parameter in torch.nn.Module.named_parameters(module)}
    return [(name, plain[id(parameter)]) for name, parameter in module.named_parameters()]


def test_what_is_and_is_not_there() -> None:
    shapes = plain_program(LlamaSection(**SHAPE), OUTPUTS).shapes
    assert not [name for name in shapes if name.endswith("bias") or "position" in name]
    assert shapes["lm_head.weight"] == shapes["word_embeddings.weight"] == (61, 32)
    assert shapes["decoder.0.attention.qkv.weight"] == (32 + 16 + 16, 32)
    assert shapes["decoder.0.mlp.up.weight"] == (96, 32)
    tied = plain_program(LlamaSection(**SHAPE, tie_word_embeddings=True), OUTPUTS).shapes
    assert shapes.keys() - tied.keys() == {"lm_head.weight"}
