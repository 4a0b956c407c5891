"""A decoder, its objective and its rows go together; what does not is said with the way out."""

from __future__ import annotations

from typing import Any

import pytest

from ctxlm_ds.recipe.check import find_problems, unused_settings
from ctxlm_ds.recipe.schema import RunConfig

GPT2: dict[str, dict[str, Any]] = {
    "model": {"family": "gpt2", "pre_layer_norm": True},
    "objective": {"name": "causal_lm"},
    "data": {"sample_format": "blocks"},
}


def config(**sections: dict[str, Any]) -> RunConfig:
    """GPT-2's recipe; `sections` replace its settings."""
    return RunConfig.model_validate({name: {**GPT2.get(name, {}), **sections.get(name, {})} for name in GPT2})


def test_a_gpt2_and_a_gpt1_are_possible() -> None:
    assert find_problems(config()) == []
    assert find_problems(config(model={"family": "gpt1", "pre_layer_norm": False})) == []
    assert find_problems(config(data={"reset_at_documents": False, "seq_length": 1})) == []


@pytest.mark.parametrize(
    ("sections", "path", "remedy"),
    [
        ({"objective": {"name": "masked_lm"}}, "objective.name", "set causal_lm"),
        ({"objective": {"name": "masked_lm_nsp"}}, "objective.name", "set causal_lm"),
        ({"data": {"sample_format": "full_sentences"}}, "data.sample_format", "set blocks for model.family gpt2"),
        ({"model": {"pre_layer_norm": False}}, "model.pre_layer_norm", "before each block; set it to true"),
        ({"model": {"family": "gpt1"}}, "model.pre_layer_norm", "after each block; set it to false"),
        ({"data": {"packing": True}}, "data.packing", "set it to false"),
        ({"data": {"num_duplicates": 10}}, "data.num_duplicates", "set it to 1"),
    ],
)
def test_one_mistake_is_one_problem(sections: dict[str, Any], path: str, remedy: str) -> None:
    (problem,) = find_problems(config(**sections))
    assert problem.path == path and remedy in problem.text


def test_a_family_alone_is_told_all_that_goes_with_it() -> None:
    problems = find_problems(RunConfig.model_validate({"model": {"family": "gpt2"}}))
    assert [problem.path for problem in problems] == ["objective.name", "data.sample_format", "model.pre_layer_norm"]


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_an_encoder_takes_neither_causal_lm_nor_blocks(family: str) -> None:
    problems = find_problems(config(model={"family": family, "pre_layer_norm": False}))
    assert [problem.path for problem in problems] == ["objective.name", "data.sample_format"]
    assert all("set model.family to gpt2 or gpt1" in problem.text for problem in problems)


def test_masks_token_types_and_slots_without_effect_are_named() -> None:
    sections = {
        "model": {"type_vocab_size": 3},
        "objective": {"mask_prob": 0.3, "masking": "static"},
        "data": {"reset_at_documents": False, "max_sequences_per_row": 4},
    }
    named = {sentence.split(":")[0] for sentence in unused_settings(config(**sections))}
    assert named == {
        "model.type_vocab_size", "objective.mask_prob", "objective.masking", "data.max_sequences_per_row"
    }  # fmt: skip
    assert unused_settings(config(data={"max_sequences_per_row": 1})) == []
    reset = RunConfig.model_validate({"data": {"reset_at_documents": False}})
    assert [sentence.split(":")[0] for sentence in unused_settings(reset)] == ["data.reset_at_documents"]
