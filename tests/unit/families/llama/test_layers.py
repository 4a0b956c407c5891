"""LLaMA's layers beside LlamaForCausalLM: each scaling, tied and untied, any number of heads of keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ctxlm_ds.families.llama.config import LlamaSection
from tests.parity.mapping import copy_weights, hf_model, key_map_of, our_model, randomize

OUTPUTS = ("logits",)
SHAPE = {
    "vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "one head of keys per query head": {"num_key_value_heads": None},
    "one head of keys": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "linear": {"rotary_scaling": "linear", "rotary_scaling_factor": 2.0},
    "llama3": {"rotary_scaling": "llama3", "rotary_scaling_factor": 8.0, "rotary_original_length": 32},
    "gelu_tanh": {"hidden_activation": "gelu_tanh", "rotary_base": 500_000.0},
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str) -> None:
    model = LlamaSection(**{**SHAPE, **CASES[name]})
    theirs, ours = hf_model(model, OUTPUTS).eval(), our_model(model, OUTPUTS).eval()
    randomize(theirs)
    copy_weights(theirs, ours, key_map_of(model, OUTPUTS))
    ids = torch.randint(3, 61, (2, 64), generator=torch.Generator().manual_seed(0))
    fields = {
        "input_ids": ids, "position_ids": torch.arange(64).expand(2, 64), "sequence_ids": torch.ones_like(ids),
        "sequence_starts": torch.tensor([[0, 64], [0, 64]]),
    }  # fmt: skip
    with torch.no_grad():
        torch.testing.assert_close(ours.run(fields)["logits"], theirs(ids).logits, rtol=1e-4, atol=1e-4)
