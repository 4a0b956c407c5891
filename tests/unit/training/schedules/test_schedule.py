"""Learning rates against those of transformers and of torch's own LambdaLR."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import optimization

from ctxlm_ds.errors import ConfigError, TrainingError
from ctxlm_ds.recipe import choices
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.phases import run_phases
from ctxlm_ds.training.schedules.schedule import LearningRateSchedule

PEAK = 6e-4
STEPS = 60


def rates_of(make: Any, **arguments: Any) -> list[float]:
    """Rates that an optimizer really uses in each update under a scheduler of transformers or torch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = make(optimizer, **arguments)
    rates = []
    for _ in range(STEPS + 10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def ours(**settings: Any) -> list[float]:
    schedule = LearningRateSchedule(choices.SCHEDULE.make(**settings), PEAK, STEPS)
    return [schedule.at(step) for step in range(STEPS + 10)]


def cases() -> Iterator[tuple[dict[str, Any], Any, dict[str, Any]]]:
    """Our settings, transformers' function, and what it is given besides."""
    for warmup in (0, 1, 7, 60):
        yield {"name": "linear", "warmup_steps": warmup}, transformers.get_linear_schedule_with_warmup, {}
    for power, final in [(1.0, 0.0), (2.0, 1e-5), (0.5, 1e-5)]:
        settings = {"name": "polynomial", "warmup_steps": 7, "power": power, "final_learning_rate": final}
        theirs = {"lr_end": final, "power": power}
        yield settings, transformers.get_polynomial_decay_schedule_with_warmup, theirs
    yield {"name": "cosine", "warmup_steps": 7}, transformers.get_cosine_schedule_with_warmup, {}
    floor = {"name": "cosine", "warmup_steps": 7, "final_learning_rate": 1e-5}
    yield floor, optimization.get_cosine_with_min_lr_schedule_with_warmup, {"min_lr": 1e-5}
    for warmup in (0, 7):
        yield {"name": "inverse_sqrt", "warmup_steps": warmup}, transformers.get_inverse_sqrt_schedule, {}
    yield {"name": "constant", "warmup_steps": 7}, transformers.get_constant_schedule_with_warmup, {}


@pytest.mark.parametrize(("settings", "make", "given"), list(cases()))
def test_rates_are_those_of_transformers(settings: dict[str, Any], make: Any, given: dict[str, Any]) -> None:
    if "num_training_steps" in inspect.signature(make).parameters:
        given = given | {"num_training_steps": STEPS}
    expected, found = rates_of(make, num_warmup_steps=settings["warmup_steps"], **given), ours(**settings)
    if settings["name"] == "cosine":
        # transformers' cosine rises again after the end; ours stays at the final rate.
        assert found[STEPS:] == [settings.get("final_learning_rate", 0.0)] * 10
        expected, found = expected[: STEPS + 1], found[: STEPS + 1]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-18)


def test_an_inverse_square_root_may_have_a_floor() -> None:
    assert min(ours(name="inverse_sqrt", warmup_steps=7, final_learning_rate=3e-4)[7:]) == 3e-4


def test_cosine_counted_from_the_start() -> None:
    """warmup_cosine of finetune-transformer-lm's opt.py: x / warmup up to the warmup, then (1 + cos(pi x)) / 2."""
    found = ours(name="cosine", warmup_steps=7, decay_from="start")
    peak = ours(name="constant")[0]
    expected = [step / 7 if step < 7 else 0.5 * (1 + math.cos(math.pi * step / STEPS)) for step in range(STEPS + 1)]
    assert found[: STEPS + 1] == pytest.approx([peak * share for share in expected], rel=1e-12, abs=1e-18)


@pytest.mark.parametrize(("shape", "theirs"), [("linear", "linear"), ("one_minus_sqrt", "1-sqrt")])
@pytest.mark.parametrize("final", [0.0, 6e-5])
def test_wsd(final: float, shape: str, theirs: str) -> None:
    steps = {"num_warmup_steps": 7, "num_decay_steps": 12, "num_training_steps": STEPS}
    expected = rates_of(optimization.get_wsd_schedule, **steps, decay_type=theirs, min_lr_ratio=final / PEAK)
    found = ours(name="wsd", warmup_steps=7, decay_fraction=0.2, decay_shape=shape, final_learning_rate=final)
    start = 7 if final else 0  # transformers starts the warmup at the final rate, ours at 0 in every schedule
    assert found[start:] == pytest.approx(expected[start:], rel=1e-9, abs=1e-18)


@pytest.mark.parametrize(
    ("known", "segments"),
    [
        ({"name": "linear", "warmup_steps": 7, "final_learning_rate": PEAK / 8},
         [{"shape": "warmup", "steps": 7}, {"shape": "linear", "steps": 53, "to": 0.125}]),
        ({"name": "cosine", "warmup_steps": 7},
         [{"shape": "warmup", "steps": 7}, {"shape": "cosine", "steps": 53}]),
        ({"name": "wsd", "warmup_steps": 6, "decay_fraction": 0.2},
         [{"shape": "warmup", "share": 0.1}, {"shape": "constant", "share": 0.7}, {"shape": "linear", "share": 0.2}]),
        ({"name": "wsd", "decay_fraction": 0.2, "decay_shape": "one_minus_sqrt"},
         [{"shape": "constant", "share": 0.8}, {"shape": "one_minus_sqrt", "share": 0.2}]),
    ],
)  # fmt: skip
def test_segments_equal_the_schedules_that_they_can_express(known: Any, segments: Any) -> None:
    assert ours(name="segments", segments=segments) == pytest.approx(ours(**known), rel=1e-15, abs=PEAK * 1e-15)


def test_a_segment_may_restart_and_another_continue() -> None:
    """Two waves of 20 steps from the peak (Loshchilov and Hutter 2017), a new warmup, and a decay from there."""
    waves = {"shape": "cosine", "steps": 20, "to": 0.1, "repeats": 2}
    rest = [{"shape": "warmup", "steps": 4, "to": 0.5}, {"shape": "linear", "steps": 10, "to": 0.3}]
    found = [rate / PEAK for rate in ours(name="segments", warmup_steps=2, segments=[waves, *rest])]
    wave = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 20)) for step in range(20)]
    rise, fall = [0.1 + 0.4 * step / 4 for step in range(4)], [0.5 - 0.2 * step / 10 for step in range(10)]
    wanted = [0.0, 0.5, *wave, *wave, *rise, *fall, 0.3]
    assert found[: len(wanted)] == pytest.approx(wanted, abs=1e-12) and set(found[len(wanted) :]) == {found[-1]}
    assert found[-1] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([], "the segments have 0 of 60 steps"),
        ([{"shape": "linear", "share": 0.6, "repeats": 2}], "the segments have 72 of 60 steps"),
        ([{"shape": "linear"}], "linear needs either steps or share"),
        ([{"shape": "linear", "share": 0.1, "steps": 6}], "linear needs either steps or share"),
        ([{"shape": "linear", "share": 0.001}], "of at least one step"),
        ([{"shape": "linear", "steps": 5, "to": 0.2}, {"shape": "cosine", "steps": 5, "to": 0.4}],
         "cosine from 0.2 to 0.4 of the peak: a warmup rises and a decay falls"),
        ([{"shape": "linear", "steps": 5}, {"shape": "wave", "steps": 5}], "wave"),
    ],
)  # fmt: skip
def test_wrong_segments_are_one_error(segments: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"schedule: {{name: segments, segments: {json.dumps(segments)}}}\ntraining: {{max_steps: 60}}\n")
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_decay_by_wall_time_is_planned_from_the_speed() -> None:
    """10 of 36 s are for the decay: at 27 s and 9 steps, 3 more fit."""
    settings = {"name": "wsd", "warmup_steps": 7, "decay_fraction": 10 / 36, "until_hours": 0.01}
    schedule = LearningRateSchedule(choices.SCHEDULE.make(**settings), PEAK, STEPS)
    assert schedule.plan(8, 25.9) == [] and schedule.plan(9, 27.0) == [9, 12]
    assert [schedule.at(step, [9, 12]) / PEAK for step in range(8, 12)] == pytest.approx([1, 1, 2 / 3, 1 / 3])
    assert schedule.at(8) == PEAK
    assert schedule.plan(30, 27.0) == [30, 40] and schedule.plan(42, 27.0) == [42, 56]
    assert schedule.plan(43, 28.0) == [43, 55] and schedule.plan(50, 27.0) == []  # it decays since step 43 of 60
    assert schedule.plan(9, 99.0) == [9, 10]
    first = LearningRateSchedule(choices.SCHEDULE.make(**settings, total_steps=STEPS), PEAK, max_steps=10)
    assert first.plan(9, 27.0) == [9, 10]  # the run, or its phase, is shorter than its schedule
    with pytest.raises(TrainingError, match="6 of 7 steps of warmup fit before the decay; shorten it or give more"):
        schedule.plan(6, 27.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("decay_fraction: 1.0", "schedule.decay_fraction: 1 leaves no time to measure the speed"),
        ("decay_fraction: 0.6, warmup_fraction: 0.5", "36 steps of decay and 30 of warmup exceed 60"),
    ],
)
def test_a_budget_without_time_before_the_decay_is_refused(settings: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"schedule: {{name: wsd, until_hours: 23, {settings}}}\ntraining: {{max_steps: 60}}\n")
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_decay_over_the_whole_run_starts_at_the_peak() -> None:
    """OneMinusSqrtScheduler of AnswerDotAI/ModernBERT: alpha_f + (1 - alpha_f) (1 - sqrt(n / N))."""
    found = ours(name="wsd", decay_fraction=1.0, decay_shape="one_minus_sqrt", final_learning_rate=PEAK / 1000)
    expected = [PEAK * (0.001 + 0.999 * (1 - math.sqrt(step / STEPS))) for step in range(STEPS + 1)]
    assert found[: STEPS + 1] == pytest.approx(expected, rel=1e-12)


def test_wsd_without_a_decay_stays_at_the_peak() -> None:
    assert ours(name="wsd", warmup_steps=2, decay_fraction=0.0)[2:STEPS] == [PEAK] * (STEPS - 2)


def test_decay_counted_from_the_start_is_bert_s_own() -> None:
    """google-research/bert, optimization.py: tf.train.polynomial_decay over all steps, replaced during the warmup."""

    def bert(step: int) -> float:
        return PEAK * step / 7 if step < 7 else PEAK * (1 - min(step, STEPS) / STEPS)

    found = ours(name="linear", warmup_steps=7, decay_from="start")
    assert found == pytest.approx([bert(step) for step in range(STEPS + 10)], rel=1e-12, abs=1e-18)
    expected = rates_of(torch.optim.lr_scheduler.PolynomialLR, total_iters=STEPS, power=0.5)
    found = ours(name="polynomial", warmup_steps=7, power=0.5, decay_from="start")
    assert found[7:STEPS] == pytest.approx(expected[7:STEPS], rel=1e-9)


def test_a_second_phase_goes_on_along_the_first_one_s_line() -> None:
    whole = LearningRateSchedule(choices.SCHEDULE.make(warmup_steps=7, total_steps=STEPS), PEAK, 40)
    second = LearningRateSchedule(choices.SCHEDULE.make(warmup_steps=7, total_steps=STEPS, start_step=40), PEAK, 20)
    assert [second.at(step) for step in range(20)] == [whole.at(40 + step) for step in range(20)]
    implied = LearningRateSchedule(choices.SCHEDULE.make(warmup_steps=7, start_step=40), PEAK, 20)
    assert implied.total_steps == STEPS


def test_bert_base_s_two_phases_meet() -> None:
    first, second = (phase.config for phase in run_phases(load_config("bert-base")))
    one = LearningRateSchedule(first.schedule, first.optimizer.learning_rate, first.training.max_steps)
    two = LearningRateSchedule(second.schedule, second.optimizer.learning_rate, second.training.max_steps)
    assert two.at(0) == one.at(900_000) == pytest.approx(1e-5)
    assert one.at(5_000) == pytest.approx(5e-5)
    assert two.at(100_000) == 0.0


@pytest.mark.parametrize(
    ("recipe", "phase", "peak", "share", "total"),
    [
        ("bert-large-lamb", 0, 6e-3, 0.2843, 7038), ("bert-large-lamb", 1, 4e-3, 0.128, 1563),
        ("bert-base-lamb", 0, 6e-3, 0.2843, 7038), ("bert-base-lamb", 1, 4e-3, 0.128, 1563),
    ],
)  # fmt: skip
def test_the_lamb_recipes_have_the_rates_of_nvidia_s_scheduler(
    recipe: str, phase: int, peak: float, share: float, total: int
) -> None:
    """DeepLearningExamples, BERT/schedulers.py: PolyWarmUpScheduler.step() sets last_epoch to the updates done + 1."""

    def nvidia(updates_done: int) -> float:
        progress = (updates_done + 1) / total
        return peak * progress / share if progress < share else peak * (1.0 - progress) ** 0.5

    config = run_phases(load_config(recipe))[phase].config
    assert config.training.max_steps == total
    schedule = LearningRateSchedule(config.schedule, config.optimizer.learning_rate, total)
    found = [schedule.at(step) for step in range(total)]
    expected = [nvidia(step) for step in range(total)]
    # The warmup is rounded down to complete steps (2,000 for 2,000.9), so its last update is the first of the decay.
    last = schedule.warmup_steps - 1
    assert last == int(share * total) - 1
    del found[last], expected[last]
    assert found == pytest.approx(expected, rel=5e-4, abs=1e-18)
    assert found[0] == pytest.approx(peak / (last + 1)) and found[-1] == 0
