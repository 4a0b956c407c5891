"""training.ema with an optimizer of the JSON, around refused updates, and of parameters that are not trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.recipe import choices
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.training.engine.engine import Engine
from ctxlm_ds.training.loop.state import Anomaly, TrainState
from tests.dist.runner import ranks_of_this_file, run_ranks  # noqa: F401
from tests.dist.states import Layout, resume_newest, save_at, some_steps
from tests.dist.training import build_engine, gather_weights, step_of

pytestmark = pytest.mark.dist
LAYOUT = Layout(1, 2)
EMA = LAYOUT.config().with_values("training", ema=0.9)
TRAINED = "encoder.1.mlp"


def averages(engine: Engine) -> dict[str, torch.Tensor]:
    with engine.average.in_place_of_the_weights():
        return {name: value.clone() for name, value in gather_weights(engine).items()}


def save_and_resume(rank: int, world_size: int, run_dir: Path, config: RunConfig, settings: Any) -> list[Any]:
    """Losses and averages after two steps more, of a run and of a resume of it."""
    engine = build_engine(config, settings)
    some_steps(engine, 0, 2)
    save_at(engine, config, run_dir, TrainState(step=2))
    resumed = build_engine(config, settings)
    resume_newest(resumed, config, run_dir)
    return [(some_steps(each, 2, 4), averages(each)) for each in (engine, resumed)]


def test_an_optimizer_of_the_json_resumes_with_it(tmp_path: Path) -> None:
    config = EMA.model_copy(update={"optimizer": choices.OPTIMIZER.make(name="from_ds_config")})
    settings = LAYOUT.user_json() | {"optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": "auto"}}}
    (losses, kept), (again, loaded) = run_ranks(save_and_resume, 1, tmp_path, config, settings, timeout_s=180)[0]
    assert losses == again and all(torch.equal(loaded[name], value) for name, value in kept.items())


def skip_save_and_resume(rank: int, world_size: int, run_dir: Path) -> list[float]:
    engine = build_engine(EMA, LAYOUT.user_json())
    engine.train_step(step_of(engine, 0), 0, 0.01, lambda loss: Anomaly("spike", "refused"))
    save_at(engine, EMA, run_dir, TrainState(step=1))
    resumed = build_engine(EMA, LAYOUT.user_json())
    resume_newest(resumed, EMA, run_dir)
    return some_steps(resumed, 1, 3)


def test_a_run_resumes_before_its_first_update(tmp_path: Path) -> None:
    alone, resumed = (run_ranks(function, 1, *more, timeout_s=180)[0]
                      for function, more in ((steps_alone, ()), (skip_save_and_resume, (tmp_path,))))  # fmt: skip
    assert resumed == alone


def refuse_a_later_step(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """Averages before a step whose update is refused, after it, and after the same step without a refusal."""
    engine = build_engine(EMA, LAYOUT.user_json())
    some_steps(engine, 0, 2)
    found = [averages(engine)]
    engine.train_step(step_of(engine, 2), 2, 0.01, lambda loss: Anomaly("spike", "refused"))
    found.append(averages(engine))
    some_steps(engine, 2, 3)
    return [*found, averages(engine)]


def test_a_refused_update_leaves_it() -> None:
    before, refused, applied = run_ranks(refuse_a_later_step, 1, timeout_s=180)[0]
    assert all(torch.equal(refused[name], value) for name, value in before.items())
    assert not all(torch.equal(applied[name], value) for name, value in before.items())


def steps_alone(rank: int, world_size: int) -> list[float]:
    return some_steps(build_engine(EMA, LAYOUT.user_json()), 1, 3)


def continue_trained_in_part(rank: int, world_size: int, run_dir: Path) -> dict[str, Any]:
    """Averages of a run that trained some parameters, and of a resume and a new run of it that train all."""
    some = EMA.with_values("training", only=[TRAINED], seed=7)
    engine = build_engine(some, LAYOUT.user_json())
    some_steps(engine, 0, 2)
    save_at(engine, some, run_dir, TrainState(step=2))
    # Their own initial values are others, those of another seed.
    resumed = build_engine(EMA, LAYOUT.user_json())
    resume_newest(resumed, EMA.with_values("training", seed=7), run_dir)
    begins_with = EMA.model_copy(update={"initialize_from": str(run_dir), "initialize_moments": True})
    begun = build_engine(begins_with, LAYOUT.user_json())
    same = build_engine(some.with_values("training", seed=8), LAYOUT.user_json())
    resume_newest(same, some, run_dir)
    found = {name: averages(each) for name, each in (("resumed", resumed), ("begun", begun), ("same", same))}
    return found | {"run": averages(engine), "weights": gather_weights(engine)}


def test_the_average_of_an_untrained_parameter_is_its_weight(tmp_path: Path) -> None:
    found = run_ranks(continue_trained_in_part, 1, tmp_path, timeout_s=240)[0]
    for name, value in found["run"].items():
        assert torch.equal(value, found["weights"][name]) == (TRAINED not in name), name
        for other in ("resumed", "begun", "same"):
            assert torch.equal(found[other][name], value), (other, name)
