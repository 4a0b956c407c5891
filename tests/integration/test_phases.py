"""A run in phases, on two ranks: the chain of runs that it replaces, kills at a boundary, other ranks per row."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ctxlm_ds.apps.convert.fork import fork
from ctxlm_ds.checkpoint.saved_state import saved_state
from tests.integration.conftest import Prepared
from tests.integration.route import NO_DROPOUT, call, launcher, metrics, pretrain_words

LONGER = {"data": {"seq_length": 64}, "training": {"global_batch_size": 4}}
PHASES = [{"steps": 6}, {"steps": 4, "moments": "fresh", "set": LONGER}]


def train(
    route: Prepared, folder: Path, *overrides: str, phases: list[dict[str, Any]] | None = None,
    check: bool = True, ranks: int = 2, stage: int = 2, **sections: dict[str, Any],
) -> Any:  # fmt: skip
    """Pretrain in FOLDER/run with the tiny recipe, and these phases."""
    folder.mkdir(exist_ok=True)
    training = {"max_steps": None if phases else 10}
    settings = {"training": training, "evaluation": {"interval_steps": 0}, **sections}
    recipe = route.recipe(folder / "recipe.yaml", checkpoint={"interval_steps": 2, "keep_last": 9}, **settings)
    own = [f"phases={json.dumps(phases)}"] if phases else []
    words = pretrain_words(recipe, [f"run_dir={folder / 'run'}", *own, *overrides], stage)
    return call(*launcher("forked", ranks), *words, check=check)


def read_rows(run: Path) -> list[Any]:
    """The rows of each segment of a run's ledger, and what was read of its sources."""
    segments = json.loads((run / "ledger.json").read_text())["segments"]
    return [(one["from"], one["to"], [source["read"] for source in one["sources"]]) for one in segments]


def same_weights(one: Path, other: Path) -> None:
    """Assert that two checkpoints have the same weights and moments."""
    paths = sorted(one.glob("*.safetensors"))
    assert len(paths) == 4
    for path in paths:
        ours, theirs = load_file(path), load_file(other / path.name)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def phased(bert_route: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phased")
    done = train(bert_route, folder, phases=PHASES)
    assert "phase 1 is over at step 6" in done.stderr and "phase 2 of 2 begins: rows start again" in done.stderr
    return folder / "run"


def test_it_is_bitwise_the_chain_of_runs(phased: Path, bert_route: Prepared, tmp_path: Path) -> None:
    """With dropout, whose keys begin again in each phase, and one line of the rate."""
    total = "schedule.total_steps=10"
    train(bert_route, tmp_path / "one", "training.max_steps=6", total)
    second = [f"{section}.{key}={value}" for section, keys in LONGER.items() for key, value in keys.items()]
    start = [f"initialize_from={tmp_path / 'one' / 'run'}", "schedule.start_step=6", "training.max_steps=4"]
    train(bert_route, tmp_path / "two", *second, *start, total)
    one, two = (metrics(tmp_path / name / "run") for name in ("one", "two"))
    chain = one | {step + 6: loss for step, loss in two.items() if step}
    assert metrics(phased) == chain and len(chain) == 10
    rows = read_rows(phased)
    assert rows == read_rows(tmp_path / "two" / "run") and [row[:2] for row in rows] == [(0, 48), (0, 16)]
    same_weights(phased / "checkpoints" / "step-00000010", tmp_path / "two" / "run" / "checkpoints" / "step-00000004")


@pytest.mark.parametrize("kept", [pytest.param(4, marks=pytest.mark.soak), 6, 8])
def test_a_kill_around_the_boundary_changes_nothing(
    kept: int, phased: Path, bert_route: Prepared, tmp_path: Path
) -> None:
    """What a killed run leaves: a newest checkpoint before, at or after the boundary."""
    shutil.copytree(phased, tmp_path / "run")
    for step in range(kept + 2, 11, 2):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    train(bert_route, tmp_path, phases=PHASES)
    assert read_rows(tmp_path / "run") == read_rows(phased)
    assert metrics(tmp_path / "run") == metrics(phased)
    same_weights(tmp_path / "run" / "checkpoints" / "step-00000010", phased / "checkpoints" / "step-00000010")


def test_phases_without_changes_are_one_run(bert_route: Prepared, tmp_path: Path) -> None:
    """Kept moments, their count and the rows continue: bitwise, without dropout, whose keys begin again."""
    train(bert_route, tmp_path / "one", model=NO_DROPOUT)
    done = train(bert_route, tmp_path / "two", phases=[{"steps": 6}, {"steps": 4}], model=NO_DROPOUT)
    assert "phase 2 of 2 begins: rows continue" in done.stderr
    last = Path("run", "checkpoints", "step-00000010")
    same_weights(tmp_path / "two" / last, tmp_path / "one" / last)
    one, two = (saved_state(tmp_path / name / last) for name in ("one", "two"))
    assert (two.phase, two.first_step, two.first_row) == (1, 6, 48)
    assert (one.step, one.rows_consumed, one.tokens) == (two.step, two.rows_consumed, two.tokens)


def test_a_phase_may_share_rows_between_ranks(bert_route: Prepared, tmp_path: Path) -> None:
    """The groups of context parallelism are made at the boundary; the losses are those of the other layout."""
    cut = [{"steps": 3}, {"steps": 3, "set": {"data": {"seq_length": 64}, "training": {"global_batch_size": 4}}}]
    shared = [cut[0], {**cut[1], "set": {**LONGER, "parallel": {"context_parallel_size": 2}}}]
    for name, phases in (("one", cut), ("two", shared)):
        train(bert_route, tmp_path / name, phases=phases, model=NO_DROPOUT)
    one, two = metrics(tmp_path / "one" / "run"), metrics(tmp_path / "two" / "run")
    assert sorted(one) == [1, 2, 3, 4, 5, 6] and list(two.values()) == pytest.approx(list(one.values()), rel=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize(("axis", "ranks", "stage"), [
    ("tensor", 2, 1), ("pipeline", 2, 1), (None, 2, 0), (None, 2, 3), ("tensor", 4, 2), ("pipeline", 4, 0),
])  # fmt: skip
def test_every_layout_trains_the_phases_of_one_rank(
    axis: str | None, ranks: int, stage: int, bert_route: Prepared, tmp_path: Path
) -> None:
    phases = [PHASES[0], {**PHASES[1], "moments": "keep"}]
    train(bert_route, tmp_path / "one", phases=phases, model=NO_DROPOUT, ranks=1, stage=1)
    settings = [] if axis is None else [f"parallel.{axis}_parallel_size=2"]
    train(bert_route, tmp_path / "two", *settings, phases=phases, model=NO_DROPOUT, ranks=ranks, stage=stage)
    one, two = metrics(tmp_path / "one" / "run"), metrics(tmp_path / "two" / "run")
    assert len(one) == 10 and list(two.values()) == pytest.approx(list(one.values()), rel=1e-5)


def test_a_branch_keeps_the_phases_to_come(phased: Path, tmp_path: Path) -> None:
    assert fork(f"{phased}@4", tmp_path / "branch") == 4
    call(*launcher("forked", 2), *pretrain_words(tmp_path / "branch" / "config.yaml", [], 2))
    assert metrics(tmp_path / "branch") == {step: loss for step, loss in metrics(phased).items() if step > 4}
    same_weights(tmp_path / "branch" / "checkpoints" / "step-00000010", phased / "checkpoints" / "step-00000010")


def test_a_phase_that_was_left_keeps_its_length(phased: Path, bert_route: Prepared, tmp_path: Path) -> None:
    shutil.copytree(phased, tmp_path / "run")
    longer = [{**PHASES[0], "steps": 7}, PHASES[1]]
    done = train(bert_route, tmp_path, phases=longer, check=False)
    assert done.returncode == 2 and "cannot change the length of a phase that it has left" in done.stderr
    assert "Traceback" not in done.stderr
    more = train(bert_route, tmp_path, phases=[PHASES[0], {**PHASES[1], "steps": 5}])
    assert max(metrics(tmp_path / "run")) == 11 and "warning: this resume changes the training" in more.stderr


HOOK = """
import gc, json, os
import torch
from ctxlm_ds.training.hooks.hooks import Hook

class Count(Hook):
    def on_run_start(self, start):
        gc.collect()
        found = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
        counts = {"step": start.step, "tensors": len(found), "elements": sum(one.numel() for one in found)}
        with open(os.environ["COUNTS"], "a") as file:
            file.write(json.dumps(counts) + "\\n")
"""


def test_nothing_of_a_phase_stays_in_memory(bert_route: Prepared, tmp_path: Path) -> None:
    """After the boundary there are as many tensors as when a fresh process begins the second phase."""
    (tmp_path / "counting.py").write_text(HOOK)
    phases = [{"steps": 2}, {"steps": 1}]
    counts = {}
    for name in ("through", "fresh"):
        extra = {"PYTHONPATH": f"{tmp_path}", "COUNTS": str(tmp_path / name)}
        folder = tmp_path / f"{name}-run"
        folder.mkdir()
        recipe = bert_route.recipe(
            folder / "recipe.yaml", logging={"hooks": ["counting:Count"]}, training={"max_steps": None},
            schedule={"warmup_steps": 1},
        )  # fmt: skip
        words = pretrain_words(recipe, [f"run_dir={folder / 'run'}", f"phases={json.dumps(phases)}"])
        if name == "fresh":
            saved = Path("run", "checkpoints", "step-00000002")
            shutil.copytree(tmp_path / "through-run" / saved, folder / saved)
        call(*launcher("forked", 1), *words, **extra)
        counts[name] = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    assert [one["step"] for one in counts["through"]] == [0, 2] and counts["through"][1] == counts["fresh"][0]
