"""ELECTRA's settings: those of the generator are checked as those of the discriminator."""

from __future__ import annotations

from typing import Any

from ctxlm_ds.families.electra.config import ElectraSection

SMALL = {
    "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024, "generator_hidden_size": 64,
    "generator_num_attention_heads": 1, "generator_intermediate_size": 256,
}  # fmt: skip


def section(**settings: Any) -> ElectraSection:
    return ElectraSection(**{**SMALL, **settings})


def test_the_generator_has_its_sizes_and_the_other_settings() -> None:
    model = section(num_layers=3, generator_num_layers=2, hidden_dropout=0.2)
    generator = model.generator
    assert (generator.hidden_size, generator.num_attention_heads, generator.intermediate_size) == (64, 1, 256)
    assert (generator.num_layers, generator.hidden_dropout, model.num_blocks) == (2, 0.2, 5)


def test_its_samples_need_keys_without_dropout_too() -> None:
    assert section(hidden_dropout=0.0, attention_dropout=0.0).drops


def test_heads_of_the_generator_divide_its_width() -> None:
    assert list(section().problems()) == []
    (problem,) = section(generator_num_attention_heads=3).problems()
    assert problem.path == "model.generator_num_attention_heads"
    assert problem.text == "3 does not divide model.generator_hidden_size 64; 2 does"


def test_ranks_share_the_heads_of_the_generator_too() -> None:
    (problem,) = section().tensor_parallel_problems(2)
    assert problem.text.startswith("2 does not divide model.generator_num_attention_heads 1, and every rank holds")
    assert list(section(generator_num_attention_heads=2).tensor_parallel_problems(2)) == []
    refused = [problem.text for problem in section(generator_num_attention_heads=4).tensor_parallel_problems(8)]
    assert [text.partition(",")[0] for text in refused] == [
        "8 does not divide model.num_attention_heads 4",
        "8 does not divide model.generator_num_attention_heads 4",
    ]


def test_rows_are_exchanged_for_heads_of_the_generator_too() -> None:
    (problem,) = section(generator_num_attention_heads=2).context_parallel_problems(2, 2)
    assert problem.path == "parallel.context_parallel_size"
    assert problem.text.startswith("2 does not divide model.generator_num_attention_heads 2 / parallel.tensor_parallel")
    assert list(section(generator_num_attention_heads=2).context_parallel_problems(2, 1)) == []
