"""LLaMA's settings: heads of keys and values, rotary scaling, and which ranks can share them."""

from __future__ import annotations

from typing import Any

import pytest

from ctxlm_ds.families.llama.config import LlamaSection

SHAPE = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}


def section(**settings: Any) -> LlamaSection:
    return LlamaSection(**{**SHAPE, **settings})


@pytest.mark.parametrize(("settings", "path", "text"), [
    ({"num_key_value_heads": 3}, "num_key_value_heads", "3 does not divide model.num_attention_heads 8"),
    ({"hidden_size": 72}, "num_attention_heads", "heads of 9 elements"),
    ({"rotary_scaling": "llama3", "rotary_low_turns": 4.0}, "rotary_low_turns", "not below model.rotary_high_turns"),
])  # fmt: skip
def test_values_that_cannot_be(settings: dict[str, Any], path: str, text: str) -> None:
    (problem,) = section(**settings).problems()
    assert problem.path == f"model.{path}" and text in problem.text


@pytest.mark.parametrize(("size", "reason"), [
    (3, "3 does not divide model.num_key_value_heads 4"),
    (8, "8 does not divide model.num_key_value_heads 4"),
])  # fmt: skip
def test_ranks_hold_complete_heads_of_keys(size: int, reason: str) -> None:
    assert not [problem for ranks in (1, 2, 4) for problem in section().tensor_parallel_problems(ranks)]
    (problem,) = section().tensor_parallel_problems(size)
    assert problem.path == "parallel.tensor_parallel_size"
    assert problem.text.startswith(reason) and "1, 2 or 4 would do" in problem.text


@pytest.mark.parametrize(("scaling", "idle"), [
    ("none", {"rotary_scaling_factor", "rotary_low_turns", "rotary_high_turns", "rotary_original_length"}),
    ("linear", {"rotary_low_turns", "rotary_high_turns", "rotary_original_length"}),
    ("llama3", set()),
])  # fmt: skip
def test_settings_of_another_scaling_are_idle(scaling: str, idle: set[str]) -> None:
    assert set(section(rotary_scaling=scaling).idle_settings) == idle
