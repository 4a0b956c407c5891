"""Steps of a growing batch: those of engines built for each size, and the same numbers in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.training.engine.engine import Engine
from ctxlm_ds.training.loop.state import TrainState
from tests.dist.runner import run_ranks
from tests.dist.states import Layout, assert_same, held_by, resume_newest, save_at
from tests.dist.training import GLOBAL_BATCH, build_engine, slice_batch, step_for_rank

pytestmark = pytest.mark.dist
SIZES = (4, 8, 8, 16)
ONE = Layout(1, 0, micro_batch_size=2)
LAYOUTS = [
    Layout(2, 3, micro_batch_size=2), Layout(4, 1, tensor=2, pipeline=2, micro_batch_size=2),
    Layout(2, 1, pipeline=2, micro_batch_size=1), Layout(2, 2, context=2, micro_batch_size=1),
    *(pytest.param(layout, marks=pytest.mark.soak) for layout in (
        Layout(2, 1, micro_batch_size=2), Layout(2, 0, tensor=2, micro_batch_size=4), Layout(2, 2, micro_batch_size=1),
        Layout(4, 0, pipeline=2, micro_batch_size=2), Layout(4, 3, context=2, micro_batch_size=2),
    )),
]  # fmt: skip


def small_step(engine: Engine, step: int) -> Step:
    """This rank's micro-batches of the first rows of a global batch."""
    topology, micro = engine.topology, engine.config.training.micro_batch_size
    whole = step_for_rank(step, GLOBAL_BATCH, 0, 1).micro_batches[0]
    starts = range(0, SIZES[step], micro)[topology.data_parallel_rank :: topology.data_parallel_size]
    own = [slice_batch(whole, start, start + micro) for start in starts]
    labels = [name for name in whole.fields if name.endswith("_labels")]
    counts = {
        name.removesuffix("_labels"): sum(int((batch.fields[name] >= 0).sum()) for batch in own) for name in labels
    }
    reads = topology.pipeline_parallel_rank in (0, topology.pipeline_parallel_size - 1)
    return Step(own if reads else [], counts, sum(batch.num_tokens for batch in own), SIZES[step], 0)


def take(engine: Engine, steps: range) -> list[tuple[float, float]]:
    results = [engine.train_step(small_step(engine, step), step, 0.01) for step in steps]
    return [(result.loss, result.grad_norm) for result in results]


def ramp(rank: int, world_size: int, layout: Layout, config: RunConfig) -> dict[str, Any]:
    engine = build_engine(config, layout.user_json())
    return {"figures": take(engine, range(len(SIZES))), **held_by(engine)}


def one_size(
    rank: int, world_size: int, layout: Layout, config: RunConfig, run_dir: Path, steps: range
) -> dict[str, Any]:
    """Resume, take the steps of one size, and save."""
    engine = build_engine(config, layout.user_json())
    resume_newest(engine, config, run_dir)
    figures = take(engine, steps)
    save_at(engine, config, run_dir, TrainState(step=steps.stop))
    return {"figures": figures, **held_by(engine)}


def by_resumes(layout: Layout, run_dir: Path) -> dict[str, Any]:
    """The same run as a series of resumes with a larger constant batch."""
    figures: list[tuple[float, float]] = []
    for size in sorted(set(SIZES)):
        training = layout.config().training.model_copy(update={"global_batch_size": size})
        config = layout.config().model_copy(update={"training": training})
        steps = range(SIZES.index(size), SIZES.index(size) + SIZES.count(size))
        found = run_ranks(one_size, layout.world_size, layout, config, run_dir, steps, timeout_s=120)[0]
        figures += found["figures"]
    return found | {"figures": figures}


@pytest.mark.parametrize("layout", [ONE, LAYOUTS[0], pytest.param(LAYOUTS[2], marks=pytest.mark.soak)], ids=str)
def test_a_growing_batch_is_a_series_of_resumes_bitwise(tmp_path: Path, layout: Layout) -> None:
    found = run_ranks(ramp, layout.world_size, layout, layout.config(), timeout_s=120)[0]
    expected = by_resumes(layout, tmp_path)
    assert found["figures"] == expected["figures"]
    assert_same(found, expected)


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    layout = Layout(**{**ONE.__dict__, "dropout": 0.0})
    return run_ranks(ramp, 1, layout, layout.config(), timeout_s=120)[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_growing_batch_is_exact_in_every_layout(reference: dict[str, Any], layout: Layout) -> None:
    layout = Layout(**{**layout.__dict__, "dropout": 0.0})
    for found in run_ranks(ramp, layout.world_size, layout, layout.config(), timeout_s=240):
        for mine, expected in zip(found["figures"], reference["figures"], strict=True):
            assert mine == pytest.approx(expected, rel=1e-5)
