"""Tables: readable on an ordinary terminal, aligned in a file."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ctxlm_ds.apps.plan.plan import Planner
from ctxlm_ds.apps.plan.plan_run import (
    COLUMNS,
    NARROW_COLUMNS,
    WIDE_TERMINAL,
    build_cluster,
    build_parser,
    describe_recommendation,
    load_recipes,
    plan_recipe,
    plan_table,
)
from ctxlm_ds.apps.plan.search import Search, search_layouts
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.hardware import Cluster, find_gpu
from ctxlm_ds.recipe.json_source import load_deepspeed_json
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.phases import run_phases
from ctxlm_ds.recipe.words import STEPS_FOLLOW
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents


@pytest.fixture(scope="module")
def found() -> Search:
    jsons = {stage: load_deepspeed_json(f"zero{stage}") for stage in (1, 2, 3)}
    cluster = Cluster(find_gpu("A100-80"), 16, 8)
    return search_layouts(Planner(load_config("roberta-large"), cluster, jsons))


def test_columns_fit_the_terminal_and_are_aligned_in_a_file(found: Search) -> None:
    narrow, wide, file = (plan_table(found.plans, *width) for width in ((80,), (WIDE_TERMINAL,), ()))
    assert narrow[0].split() == list(NARROW_COLUMNS) and max(map(len, narrow)) <= 80
    assert len([line for line in narrow if "%" in line]) == len(found.plans)
    assert all(name in wide[0] for name in COLUMNS) and max(map(len, wide)) <= WIDE_TERMINAL
    assert len(file) == len(found.plans) + 1 and len({len(line) for line in file}) == 1


def test_the_recommendation_names_what_moves_and_what_fills(found: Search) -> None:
    plan = found.recommended
    assert plan is not None
    text = "\n".join(describe_recommendation(plan, "the command", load_config("roberta-large").training.max_steps))
    for words in ("the command", "optimizer", "activations", "data all-reduce", "MB", "days for 500,000 steps"):
        assert words in text
    by_hours = describe_recommendation(plan, "the command", STEPS_FOLLOW)[1]
    assert "GiB per GPU" in by_hours and by_hours.endswith("for as many steps as its hours allow")


def test_the_command_of_a_later_phase_leaves_the_first_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    args = build_parser().parse_args(["--config", "bert-large-lamb", "--gpu", "A100-80", "--gpus-per-node", "8"])
    cluster = build_cluster(args)
    plan_recipe(args, cluster, load_recipes(args, cluster)[1], 1)
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    settings = words[words.index("--set") + 1 :]
    first, second = run_phases(load_config("bert-large-lamb", settings, 8), 8)
    planned = next(one for one in settings if "micro_batch_size" in one).rpartition("=")[2]
    assert second.config.training.micro_batch_size == int(planned)
    before = run_phases(load_config("bert-large-lamb"))[0].config.training
    assert first.config.training.micro_batch_size == before.micro_batch_size


@pytest.mark.parametrize("family", ["bert", "elmo"])
def test_the_vocabulary_is_that_of_the_tokenizer_if_there_is_one(family: str, tmp_path: Path) -> None:
    kind = "elmo" if family == "elmo" else "wordpiece"
    size = train_tokenizer(kind, make_documents(60, seed=1), 300, tmp_path / "tok").output_size
    for path, expected in ((tmp_path / "tok", size), (tmp_path / "none", None)):
        words = ["--config", f"{family}-laptop", "--gpu", "H100", "--set", f"tokenizer.path={path}"]
        args = build_parser().parse_args(words)
        assert load_recipes(args, build_cluster(args))[0].model.vocab_size == expected


def test_a_budget_in_words_has_no_steps_to_plan() -> None:
    args = build_parser().parse_args(["--config", "babylm-10m", "--gpu", "H100"])
    with pytest.raises(ConfigError, match=r"13,500,000 words give the steps only when the run starts; add --set"):
        load_recipes(args, build_cluster(args))
    args.set = ["training.max_words=null", "training.max_steps=2000"]
    assert load_recipes(args, build_cluster(args))[0].training.max_steps == 2000
