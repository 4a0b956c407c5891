"""slurm/pretrain.sbatch as it is, on 2 nodes with 2 tasks each and on 3 nodes: the losses are those of one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.process.run_history import START
from tests.integration.route import call, launcher, pretrain_words
from tests.slurm.runs import NO_DROPOUT, Runs, assert_close, curves

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
SHORT = {"max_steps": 12}


@pytest.fixture(scope="module")
def one_machine(runs: Runs) -> dict[str, dict[int, float]]:
    """One process, no Slurm."""
    folder = runs.folder / "one-machine"
    recipe = runs.recipe(folder, training=SHORT, model=NO_DROPOUT, evaluation={"interval_steps": 6})
    call(*launcher("python", 1), *pretrain_words(recipe, [f"run_dir={folder / 'run'}"]))
    return curves(folder / "run")


@pytest.mark.parametrize(("nodes", "tasks"), [(2, 2), (3, 1)])
def test_losses_equal_those_of_one_machine(
    nodes: int, tasks: int, runs: Runs, one_machine: dict[str, dict[int, float]], tmp_path: Path
) -> None:
    job = runs.submit(
        tmp_path, nodes=nodes, tasks=tasks, training=SHORT, model=NO_DROPOUT, evaluation={"interval_steps": 6}
    )
    job.assert_finished()
    assert [event["world_size"] for event in job.events(START)] == [nodes * tasks], job.explain()
    assert_close(job.curves(), one_machine)
    assert "Traceback" not in job.text() and "rror" not in job.text(), job.text()
