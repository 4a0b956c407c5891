"""Tables: readable on an ordinary terminal, aligned in a file."""

from __future__ import annotations

import pytest

from ctxlm_ds.apps.plan.plan import Planner
from ctxlm_ds.apps.plan.report import COLUMNS, NARROW_COLUMNS, WIDE_TERMINAL, describe_recommendation, plan_table
from ctxlm_ds.apps.plan.search import Search, search_layouts
from ctxlm_ds.recipe.hardware import Cluster, find_gpu
from ctxlm_ds.recipe.json_source import load_deepspeed_json
from ctxlm_ds.recipe.load import load_config


@pytest.fixture(scope="module")
def found() -> Search:
    jsons = {stage: load_deepspeed_json(f"zero{stage}") for stage in (1, 2, 3)}
    cluster = Cluster(find_gpu("A100-80"), 16, 8)
    return search_layouts(Planner(load_config("roberta-large"), cluster, jsons))


def test_an_ordinary_terminal_has_the_narrow_columns(found: Search) -> None:
    lines = plan_table(found.plans, 80)
    assert lines[0].split() == list(NARROW_COLUMNS)
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if "%" in line]) == len(found.plans)


def test_a_wide_terminal_has_every_column(found: Search) -> None:
    lines = plan_table(found.plans, WIDE_TERMINAL)
    assert all(name in lines[0] for name in COLUMNS)
    assert max(map(len, lines)) <= WIDE_TERMINAL


def test_columns_of_a_file_are_aligned(found: Search) -> None:
    lines = plan_table(found.plans)
    assert len(lines) == len(found.plans) + 1
    assert len({len(line) for line in lines}) == 1


def test_the_recommendation_names_what_moves_and_what_fills(found: Search) -> None:
    plan = found.recommended
    assert plan is not None
    text = "\n".join(describe_recommendation(plan, "the command", load_config("roberta-large").training.max_steps))
    for words in ("the command", "optimizer", "activations", "data all-reduce", "MB", "days for 500,000 steps"):
        assert words in text
