"""BART's and mBART's settings: published sizes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ctxlm_ds.families.bart.config import BartSection, MBartSection
from ctxlm_ds.models.program import plain_program
from ctxlm_ds.recipe.check import find_problems
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import FAMILIES

LARGE = {"hidden_size": 1024, "num_layers": 12, "num_decoder_layers": 12, "num_attention_heads": 16,
         "intermediate_size": 4096}  # fmt: skip


@pytest.mark.parametrize(("model", "parameters"), [
    (BartSection(), 139_420_416), (BartSection(**LARGE), 406_291_456), (MBartSection(), 610_851_840),
], ids=["bart-base", "bart-large", "mbart-large-cc25"])  # fmt: skip
def test_defaults_have_the_parameters_of_the_released_models(model: BartSection, parameters: int) -> None:
    """facebook/bart-base, bart-large and mbart-large-cc25 as BartForConditionalGeneration and MBartFor…"""
    model = model.model_copy(update={"vocab_size": FAMILIES.get(model.family).vocab_size})
    assert plain_program(model, ("decoder_logits",)).num_parameters == parameters


@pytest.mark.parametrize(("size", "settings", "refused"), [
    (2, {}, []),
    (4, {}, ["4 gives each rank 6 of model.intermediate_size 24, and dropout is drawn for 4 of them together; 1 or 2"]),
    (4, {"activation_dropout": 0.0}, []),
])  # fmt: skip
def test_ranks_share_heads_width_and_lanes(size: int, settings: dict[str, Any], refused: list[str]) -> None:
    section = BartSection(hidden_size=32, num_attention_heads=8, intermediate_size=24, **settings)
    found = [problem.text for problem in section.tensor_parallel_problems(size)]
    assert len(found) == len(refused)
    assert all(text.startswith(begin) for text, begin in zip(found, refused, strict=True)), found


@pytest.mark.parametrize(("density", "refused"), [(0.6, True), (0.15, False)])
def test_targets_beyond_the_position_table_are_refused(density: float, refused: bool) -> None:
    """Targets of span corruption are longer than inputs if most of a text is replaced."""
    tiny = FAMILIES.get("bart").tiny()
    objective = {"name": "span_corruption", "noise_density": density, "mean_span_length": 3.0}
    config = RunConfig.model_validate(tiny | {
        "objective": objective, "model": tiny["model"] | {"max_position_embeddings": 32},
        "data": {"sample_format": "full_sentences", "seq_length": 32},
    })  # fmt: skip
    found = [problem.line() for problem in find_problems(config)]
    assert [line for line in found if "its targets have up to" in line] == found
    assert bool(found) == refused


def test_certain_dropout_is_refused() -> None:
    texts = [problem.path for problem in BartSection(activation_dropout=1.0).problems()]
    assert texts == ["model.activation_dropout"]
