"""Context parallelism trains every family like one rank, with dropout, or is refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.check import check_config
from tests.dist.runner import Groups
from tests.families import packages, runs
from tests.families.runs import Layout
from tests.families.test_contract import RECIPES, Results, case, differences

pytestmark = pytest.mark.dist
NUM_STEPS = 5
REFUSED = {
    "elmo": "model.family elmo read complete rows", "xlnet": "model.family xlnet read complete rows",
    "xlnet+memory": "model.family xlnet read complete rows", "bart+mass": "does not divide the .* decoder's row",
    "tinybert+teacher": "compares attention scores of complete rows",
}  # fmt: skip
TWO = Layout(context=2, stage=1)
IN_FULL = Layout(context=2, tensor=2, stage=1, sequence_parallel=True, recompute=True)
CHOSEN = {
    "bert": [Layout(context=2, stage=2), Layout(context=4, stage=1), Layout(context=2, data=2, stage=2), IN_FULL],
    "llama": [Layout(context=2, stage=0), Layout(context=2, tensor=2, stage=1), Layout(context=2, pipeline=2, stage=0)],
    "t5": [Layout(context=2, stage=3), Layout(context=2, pipeline=2, stage=1, recompute=True), IN_FULL],
}  # fmt: skip
"""Layouts of the families whose runs show every part (slots; grouped heads and rotary positions; two stacks and a
bias): each kind of layout once, each part in layouts of several kinds. `make soak` runs all for every family."""
SOAKED = [Layout(context=2, tensor=2, stage=3, sequence_parallel=True), Layout(context=4, pipeline=2, stage=1)]
EVERY_LAYOUT = list(dict.fromkeys([layout for layouts in CHOSEN.values() for layout in layouts] + SOAKED))
SAME_PARTS = ("roberta", "xlm_roberta", "megatron_bert", "mbart", "t5+1.1", "gpt1", "distilbert")
"""Families without a part that another one of these tests has not."""
TWO_HEADS = "electra"
"""Its tiny generator's, which no more ranks can share: the recipe's check refuses them (tests/unit/families)."""
SHARED = [name for name in RECIPES if name not in REFUSED] if packages.families is None else []
CASES = [case(name not in SAME_PARTS, name, TWO) for name in SHARED]
CASES += [
    case(layout in CHOSEN.get(name, ()), name, layout)
    for name in SHARED
    for layout in EVERY_LAYOUT
    if name != TWO_HEADS or layout.context * layout.tensor == 2
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("context"))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_ranks_that_share_rows_train_like_one(results: Results, family: str, layout: Layout) -> None:
    run = results.run(family, dropout=True)
    wanted, got = (results.of(runs.train, of, NUM_STEPS) for of in (run, run.on(layout)))
    for figure in ("losses", "norms"):
        assert got[figure] == pytest.approx(wanted[figure], rel=1e-5)
    assert differences(got["weights"], wanted["weights"], runs.STEPS) == []


@pytest.mark.parametrize("family", ["bert", "llama"] if SHARED else [])
def test_probabilities_are_dropped_by_the_number_of_the_head(
    results: Results, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU draws them by key, so that they do not depend on the ranks either."""
    run = results.run(family, dropout=True)
    without = results.of(runs.train, run, NUM_STEPS)
    monkeypatch.setattr(runs, "NO_KEY", "")
    fresh = Results(results.folder, Groups())
    wanted, got = (fresh.of(runs.train, of, NUM_STEPS) for of in (run, run.on(TWO)))
    assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert got["losses"] != pytest.approx(without["losses"], rel=1e-4)


@pytest.mark.parametrize(("family", "reason"), REFUSED.items())
def test_rows_that_cannot_be_shared_are_refused(tmp_path: Path, family: str, reason: str) -> None:
    sections: dict[str, Any] = runs.Run(family, tmp_path, layout=TWO).sections()
    sections["teacher"] = {}
    sections["model"]["vocab_size"] = 100
    with pytest.raises(ConfigError, match=rf"parallel\.context_parallel_size: 2,? .*{reason}"):
        check_config(runs.RunConfig.model_validate(sections), None)
