"""What every registered family keeps to; it brings its `tiny()` and nothing else.

Cases run in ranks that live on (groups.py). Rows come from the real data route: a tokenizer of the family's type, a
dataset, a sample index, the loader (runs.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.registry import FAMILIES
from tests.families import runs
from tests.families.groups import run_case
from tests.families.runs import ONE_RANK, STEPS, TRAINING_STEPS, Layout, Run

pytestmark = pytest.mark.dist
every_family = pytest.mark.parametrize("family", FAMILIES.names())
MODEL_PARALLEL = [
    Layout(tensor=2, stage=1), Layout(pipeline=2, recompute=True),
    Layout(tensor=2, pipeline=2, stage=1, sequence_parallel=True),
]  # fmt: skip
LAYOUTS = [*MODEL_PARALLEL, Layout(pipeline=2, stage=1), *(Layout(data=2, stage=stage) for stage in (1, 2, 3))]
SAVED_ON, RESUMED_ON = MODEL_PARALLEL[-1], [Layout(data=2, stage=3), ONE_RANK]


class Results:
    """What cases gave, each run once a session, by function and arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: dict[Any, Any] = {}

    def run(self, family: str) -> Run:
        """A family on one rank without dropout, its rows recorded."""
        run = Run(family, self.folder)
        self.of(runs.prepare, run)
        return run

    def of(self, fn: Any, run: Run, *args: Any) -> Any:
        """The result of rank 0."""
        key = (fn, run, *args)
        if key not in self._found:
            self._found[key] = run_case(fn, run.layout.world_size, run, *args, timeout_s=120)[0]
        return self._found[key]

    def reference(self, family: str) -> Any:
        """TRAINING_STEPS steps on one rank."""
        return self.of(runs.train, self.run(family), TRAINING_STEPS)


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("families"))


def assert_same_steps(got: Any, wanted: Any) -> None:
    """Losses and gradient norms of the first steps, and the weights after them, to rounding."""
    for figure in ("losses", "norms"):
        assert got[figure][:STEPS] == pytest.approx(wanted[figure][:STEPS], rel=1e-5)
    for name, weight in wanted["weights"].items():
        torch.testing.assert_close(got["weights"][name], weight, rtol=1e-5, atol=1e-5, msg=name)


@every_family
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_gives_the_numbers_of_one_rank(results: Results, family: str, layout: Layout) -> None:
    assert_same_steps(results.of(runs.train, results.run(family).on(layout)), results.reference(family))


@every_family
def test_dropout_does_not_depend_on_the_layout(results: Results, family: str) -> None:
    run = Run(family, results.run(family).folder, dropout=True)
    if not run.config().model.drops:
        return
    wanted = results.of(runs.train, run)
    assert wanted["losses"] != pytest.approx(results.reference(family)["losses"][:STEPS], rel=1e-3)
    for layout in MODEL_PARALLEL:
        assert_same_steps(results.of(runs.train, run.on(layout)), wanted)


@every_family
def test_a_run_goes_on_under_another_layout(results: Results, family: str, tmp_path: Path) -> None:
    run = results.run(family)
    saved = results.of(runs.save, run.on(SAVED_ON), tmp_path)
    for layout in RESUMED_ON:
        resumed = results.of(runs.resume, run.on(layout), tmp_path)
        assert resumed["state"].step == STEPS
        for states in ("weights", "moments"):
            assert resumed[states].keys() == saved[states].keys()
            for name, value in saved[states].items():
                assert torch.equal(resumed[states][name], value), name
        assert resumed["next"] == pytest.approx(saved["next"], rel=1e-5)


@every_family
def test_the_tiny_recipe_trains(results: Results, family: str) -> None:
    losses = results.reference(family)["losses"]
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert last < 0.8 * first, losses
