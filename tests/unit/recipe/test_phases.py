"""Phases of a recipe: the recipes that runs one after another would have, and what a phase cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import dump_config, load_config, load_saved_config
from ctxlm_ds.recipe.phases import RunPhase, run_phases
from ctxlm_ds.recipe.words import STEPS_FOLLOW
from ctxlm_ds.training.schedules.schedule import LearningRateSchedule

FREE = "training.max_steps=null"


def phases_of(phases: str, *settings: str, recipe: str = "bert-laptop") -> list[RunPhase]:
    return run_phases(load_config(recipe, [f"phases={phases}", *settings]))


def problem_of(phases: str, *settings: str, recipe: str = "bert-laptop") -> str:
    with pytest.raises(ConfigError) as error:
        phases_of(phases, *settings, recipe=recipe)
    assert "1 problem" in str(error.value)
    return str(error.value)


def test_without_phases_a_run_is_one() -> None:
    config = load_config("bert-laptop")
    [only] = run_phases(config)
    assert only.config is config and only.is_last and only.phase.hours is None


def test_settings_hold_until_a_later_phase_changes_them() -> None:
    first, second, third = phases_of(
        "[{steps: 5}, {steps: 4, set: {data: {seq_length: 64}, training: {global_batch_size: 32}}}, "
        "{steps: 3, set: {training: {micro_batch_size: 16}}}]", FREE,
    )  # fmt: skip
    assert [one.config.data.seq_length for one in (first, second, third)] == [128, 64, 64]
    assert (third.config.training.global_batch_size, third.config.training.micro_batch_size) == (32, 16)
    assert [one.continues for one in (first, second, third)] == [False, False, True]
    assert first.config.phases == [] and third.describe() == "phase 3 of 3" and third.is_last


def test_lengths_become_steps() -> None:
    config = load_config("bert-laptop", ["phases=[{tokens: 100000}, {steps: 7}]", FREE])
    assert [one.config.training.max_steps for one in run_phases(config)] == [-(-100_000 // (64 * 128)), 7]
    assert config.training.max_steps == 13 + 7
    ramp = phases_of("[{tokens: 1000000}]", FREE, "training.batch_ramp=[32, 32, 3200]")[0].config.training
    needed = -(-1_000_000 // 128)
    assert ramp.rows_after(ramp.max_steps - 1) < needed <= ramp.rows_after(ramp.max_steps)
    more = "[{tokens: 1000000}, {tokens: 500000}, {tokens: 500000, data: restart}]"
    first, second, third = phases_of(more, FREE, "training.batch_ramp=[32, 32, 3200]")
    assert first.config.training == ramp  # the ramp is over in the second, and begins again in the third
    assert second.config.training.max_steps == -(-500_000 // (64 * 128)) < third.config.training.max_steps
    until = "{hours: 2, set: {schedule: {name: wsd, until_hours: 2, warmup_fraction: null}}}"
    assert phases_of(f"[{{steps: 3}}, {until}]", FREE)[1].config.schedule.decays_to_the_end
    words, hours = phases_of("[{words: 5M}, {hours: 2}]", FREE, "schedule.name=constant")
    assert words.config.training.max_words == 5_000_000
    assert words.config.training.max_steps == hours.config.training.max_steps == STEPS_FOLLOW


def test_a_schedule_by_wall_time_ends_with_its_phase() -> None:
    wsd = ("schedule.name=wsd", "schedule.until_hours=1", "schedule.warmup_fraction=null")
    told = problem_of("[{steps: 700}, {steps: 300}]", FREE, *wsd)
    assert "phases[1].set.schedule: missing: the schedule ends with until_hours in the phase before" in told
    phases_of("[{steps: 700}, {steps: 300, set: {schedule: {name: constant}}}]", FREE, *wsd)


def test_tokens_along_a_ramp_need_a_known_row() -> None:
    ramp = ("training.batch_ramp=[32, 32, 3200]", "schedule.name=constant")
    told = problem_of("[{hours: 1}, {tokens: 500000}]", FREE, *ramp)
    assert "phases[1].tokens: words or hours before it leave the place in the batch ramp open; give steps" in told
    phases_of("[{hours: 1}, {tokens: 500000, data: restart}]", FREE, *ramp)
    phases_of("[{hours: 1}, {tokens: 500000}]", FREE, ramp[1])


@pytest.mark.parametrize("total", [2, 3, 10, 1000])
def test_shares_are_of_the_tokens_and_fill_the_steps(total: int) -> None:
    """A phase with half the tokens a step has twice the steps of its share; each has a step."""
    half = "[{share: 0.5}, {share: 0.5, set: {training: {global_batch_size: 32}}}]"
    first, second = phases_of(half, f"training.max_steps={total}")
    assert first.config.training.max_steps + second.config.training.max_steps == total
    assert first.config.training.max_steps == max(1, round(total / 3))


def rates(phases: list[RunPhase]) -> list[float]:
    found = []
    for one in phases:
        schedule = LearningRateSchedule(
            one.config.schedule, one.config.optimizer.learning_rate, one.config.training.max_steps
        )
        found += [schedule.at(step) for step in range(one.config.training.max_steps)]
    return found


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd", "polynomial", "inverse_sqrt", "constant"])
def test_a_schedule_runs_on_over_phases(name: str) -> None:
    settings = [f"schedule.name={name}", "schedule.warmup_fraction=0.25"]
    cut = phases_of("[{steps: 8}, {steps: 20}, {steps: 12}]", FREE, *settings)
    assert rates(cut) == rates(phases_of("[]", "training.max_steps=40", *settings))


def test_a_phase_s_own_schedule_begins_with_it() -> None:
    decay = "{name: wsd, decay_fraction: 1.0, decay_shape: one_minus_sqrt, warmup_fraction: null}"
    whole = phases_of(
        f"[{{steps: 10}}, {{steps: 6, set: {{schedule: {decay}}}}}, {{steps: 4}}]", FREE, "schedule.name=constant"
    )
    assert rates(whole)[:10] == rates(phases_of("[]", "training.max_steps=10", "schedule.name=constant"))
    alone = ["training.max_steps=10", f"schedule={decay}"]
    assert rates(whole)[10:] == rates(phases_of("[]", *alone))


def test_a_saved_recipe_has_the_same_phases(tmp_path: Path) -> None:
    for name in ("bert-base", "modernbert-large", "bert-base-lamb"):
        config = load_config(name)
        (tmp_path / "config.yaml").write_text(dump_config(config))
        for again in (load_saved_config(tmp_path / "config.yaml"), load_config(tmp_path / "config.yaml")):
            assert run_phases(again) == run_phases(config)


@pytest.mark.parametrize(("phases", "settings", "problem"), [
    ("[{steps: 3, set: {model: {hidden_size: 64}}}]", [FREE], "set.model.hidden_size: 64: a phase cannot"),
    ("[{steps: 3, set: {optimizer: {name: lamb}}}]", [FREE], "set.optimizer.name: 'lamb': a phase cannot"),
    ("[{steps: 3, set: {training: {seed: 5}}}]", [FREE], "phases[0].set.training.seed: 5: a phase cannot change it"),
    ("[{steps: 3, set: {parallel: {pipeline_parallel_size: 2}}}]", [FREE], "pipeline_parallel_size: 2: a phase cannot"),
    ("[{steps: 3, set: {data: {seq_len: 64}}}]", [FREE], "data.seq_len: unknown setting (value 64); did"),
    ("[{steps: 3}, {steps: 3, set: {model: {max_position_embeddings: 64}, data: {seq_length: 64}}}]", [FREE],
     "phases[1].set.model.max_position_embeddings: 64 is below 128 of the phase before"),
    ("[{steps: 3}, {steps: 3, data: continue, set: {data: {seq_length: 64}}}]", [FREE],
     "phases[1].data: continue, but its settings change the rows; set restart"),
    ("[{share: 0.5}, {share: 0.4}]", ["training.max_steps=9"], "0.5, 0.4: all phases have one, and they add up"),
    ("[{share: 0.5}, {steps: 4}]", ["training.max_steps=9"], "all phases have one"),
    ("[{share: 0.5}, {share: 0.5}]", [FREE], "training.max_steps: missing: phases with a share divide it"),
    ("[{share: 0.5}, {share: 0.5}]", ["training.max_steps=1"], "1, but each of the 2 phases needs a step"),
    ("[{steps: 3}]", ["training.max_steps=9"], "training.max_steps: 9, but the phases have 3 steps"),
    ("[{words: 3M}, {steps: 3}]", [FREE], "schedule.name: linear, but words or hours give the steps"),
    ("[{hours: 3}]", [FREE], "schedule.name: linear, but words or hours give the steps"),
    ("[{words: 3M}]", [FREE, "training.max_words=5M"], "with phases each one has its length; set null"),
    ("[{steps: 3, set: {schedule: {warmup_steps: 9, warmup_fraction: null}}}]", [FREE], "a warmup of 9 steps"),
])  # fmt: skip
def test_what_a_phase_cannot_be_is_one_problem(phases: str, settings: list[str], problem: str) -> None:
    assert problem in problem_of(phases, *settings)


def test_a_problem_has_its_line(tmp_path: Path) -> None:
    text = "extends: bert-laptop\nname: x\ntraining: {max_steps: 9}\nphases:\n- share: 0.5\n- share: 0.5\n"
    text += "  set:\n    data:\n      seq_length: 0\n"
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"data.seq_length: 0: .*\[{tmp_path}/r.yaml:9\]"):
        load_config(tmp_path / "r.yaml")


OLD: dict[str, tuple[str, int, dict[str, Any]]] = {
    "bert-base-phase2": ("bert-base", 1, {"schedule.start_step": 900_000, "data.seq_length": 512}),
    "bert-large-lamb-phase2": ("bert-large-lamb", 1, {"initialize_moments": True, "training.max_steps": 1563}),
    "modernbert-large-restart": ("modernbert-large", 1, {"optimizer.learning_rate": 5e-5}),
    "bert-laptop-phase1": ("bert-laptop-phases", 0, {"training.max_steps": 7200, "schedule.total_steps": 8000}),
}


@pytest.mark.parametrize("name", OLD)
def test_an_old_recipe_of_one_phase_loads_with_a_warning(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxlm_ds.recipe.load.logger.propagate", True)
    recipe, number, values = OLD[name]
    config = load_config(name)
    assert f"recipe {name} is now phase {number + 1} of {recipe}" in caplog.text
    assert config.name == name and not config.phases and values.items() <= config.flat().items()
    expected = run_phases(load_config(recipe))[number].config.flat() | {"name": name}
    assert {**config.flat(), "initialize_moments": False} == {**expected, "initialize_moments": False}
    (tmp_path / "mine.yaml").write_text(f"extends: {name}\nname: mine\ntraining: {{max_steps: 5}}\n")
    assert load_config(tmp_path / "mine.yaml").flat() == config.flat() | {"name": "mine", "training.max_steps": 5}


def test_phases_in_steps_replace_the_inherited_steps(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("extends: bert-laptop\nname: r\nphases:\n- steps: 5\n")
    assert load_config(tmp_path / "r.yaml").training.max_steps == 5
    with pytest.raises(ConfigError, match="training.max_steps: 9, but the phases have 5 steps"):
        load_config(tmp_path / "r.yaml", ["training.max_steps=9"])


def test_an_option_changes_one_phase() -> None:
    settings = ["phases.1.set.training.micro_batch_size=2", "phases.0.share=0.5", "phases.1.share=0.5"]
    _, second = run_phases(load_config("bert-laptop-phases", settings))
    assert second.config.training.micro_batch_size == 2 and second.config.training.max_steps > 800
    with pytest.raises(ConfigError, match=r"--set phases.2.steps=3: the recipe has 2 phases, numbered from 0"):
        load_config("bert-laptop-phases", ["phases.2.steps=3"])
