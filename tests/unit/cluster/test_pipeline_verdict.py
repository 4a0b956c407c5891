"""Done, to do, changed: judged by what is there and how it was made. The steps really run, as cheap shell commands."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, step_name
from ctxlm_ds.cluster.pipeline import as_if_cleared, make_room, places_to_clear, refuse_changed
from ctxlm_ds.cluster.pipeline_jobs import ActiveJob
from ctxlm_ds.cluster.pipeline_outputs import RUN, Output
from ctxlm_ds.cluster.pipeline_records import Record, record_path
from ctxlm_ds.cluster.pipeline_steps import Plan, Step
from ctxlm_ds.cluster.pipeline_verdict import Verdict, judge
from ctxlm_ds.errors import ClusterError
from ctxlm_ds.process.run_history import END, START, append_event
from ctxlm_ds.recipe.pipeline_schema import StepResources
from tests.unit.cluster.pipelines import run_step, shell_plan, shell_step


def states(plan: Plan, jobs: dict[str, list[ActiveJob]] | None = None) -> dict[str, str]:
    """The state of each step."""
    return {name: verdict.state.value for name, verdict in judge(plan, jobs or {}).items()}


def chain(folder: Path, text: str = "one", **settings: Any) -> Plan:
    """a -> b -> c; `text` is what a writes."""
    a = shell_step(folder, "a", f"echo {text} > {folder}/a", settings={"text": text, **settings})
    b = shell_step(folder, "b", f"cp {folder}/a {folder}/b", "a", settings={})
    c = shell_step(folder, "c", f"cp {folder}/b {folder}/c", "b", settings={})
    return shell_plan(folder, a, b, c)


def run_all(plan: Plan) -> None:
    for step in plan.steps:
        for task in range(len(step.tasks)):
            status, said = run_step(plan, step.name, task)
            assert status == 0, said


def test_to_do_then_done(tmp_path: Path) -> None:
    plan = chain(tmp_path)
    assert states(plan) == {"a": "to do", "b": "to do", "c": "to do"}
    assert run_step(plan, "a")[0] == 0
    assert states(plan) == {"a": "done", "b": "to do", "c": "to do"}
    run_all(plan)
    assert set(states(plan).values()) == {"done"}


def test_a_folder_that_was_copied_is_as_done(tmp_path: Path) -> None:
    run_all(chain(tmp_path / "x"))
    shutil.copytree(tmp_path / "x", tmp_path / "y")
    assert set(states(chain(tmp_path / "y")).values()) == {"done"}


def test_a_missing_output_is_made_again_and_it_alone(tmp_path: Path) -> None:
    plan = chain(tmp_path)
    run_all(plan)
    (tmp_path / "b").unlink()
    assert states(plan) == {"a": "done", "b": "to do", "c": "done"}
    assert "missing" in judge(plan, {})["b"].note
    assert run_step(plan, "b")[0] == 0
    assert set(states(plan).values()) == {"done"}, "the same content: what was made of it is as good as before"


def test_another_content_after_that_concerns_what_was_made_of_it(tmp_path: Path) -> None:
    plan = chain(tmp_path)
    run_all(plan)
    (tmp_path / "a").write_text("two\n")
    assert states(plan) == {"a": "changed", "b": "changed", "c": "changed"}
    assert "no longer what this step has made" in judge(plan, {})["a"].differences[0]
    (tmp_path / "a").unlink()
    (tmp_path / "steps" / "a.json").unlink()
    assert run_step(chain(tmp_path, "two"), "a")[0] == 0
    assert states(chain(tmp_path, "two")) == {"a": "done", "b": "changed", "c": "changed"}
    assert judge(chain(tmp_path, "two"), {})["b"].differences == (
        "it was made of another a than the one that is there",
    )


def test_changed_settings_are_told_and_refused(tmp_path: Path) -> None:
    run_all(chain(tmp_path))
    plan = chain(tmp_path, "two")
    verdicts = judge(plan, {})
    assert verdicts["a"].differences == ('text "one" -> "two"',)
    assert verdicts["b"].differences == ("it is made of a, which changes",)
    expected = r'3 steps:\n  a: text "one" -> "two"\n  b: it is.*\n  c: it is(.*\n)+.*--redo'
    with pytest.raises(ClusterError, match=expected):
        refuse_changed(plan, verdicts)
    assert (tmp_path / "a").read_text() == "one\n"


def test_redo_keeps_what_was_there(tmp_path: Path) -> None:
    run_all(chain(tmp_path))
    plan = chain(tmp_path, "two")
    cleared = as_if_cleared(plan, judge(plan, {}))
    assert {name: verdict.state.value for name, verdict in cleared.items()} == dict.fromkeys("abc", "to do")
    moved = make_room(plan, judge(plan, {}))
    assert [old.name for old, _ in moved] == ["a", "b", "c"]
    assert [new.read_text() for _, new in moved] == ["one\n"] * 3
    assert set(states(plan).values()) == {"to do"}
    run_all(plan)
    assert (tmp_path / "c").read_text() == "two\n" and set(states(plan).values()) == {"done"}
    refuse_changed(plan, judge(plan, {}))


def test_a_failed_and_a_killed_step_are_to_do(tmp_path: Path) -> None:
    plan = shell_plan(tmp_path, shell_step(tmp_path, "a", "exit 3"))
    run_step(plan, "a")
    verdict = judge(plan, {})["a"]
    assert verdict.state.value == "to do" and verdict.failed and "status 3" in verdict.note
    path = record_path(tmp_path, "a", 0, 1)
    path.write_text(path.read_text().replace('"failed"', '"begun"'))
    verdict = judge(plan, {})["a"]
    assert verdict.state.value == "to do" and not verdict.failed


def test_settings_of_an_unfinished_step_may_change(tmp_path: Path) -> None:
    run_step(shell_plan(tmp_path, shell_step(tmp_path, "a", "exit 3")), "a")
    assert states(shell_plan(tmp_path, shell_step(tmp_path, "a", f"touch {tmp_path}/a"))) == {"a": "to do"}


def with_evaluation(folder: Path, command: str = "true") -> Plan:
    """a -> evaluate, which leaves nothing behind -> last."""
    a = shell_step(folder, "a", f"touch {folder}/a", settings={})
    evaluate = replace(shell_step(folder, "evaluate", command, "a"), tasks=((),))
    return shell_plan(folder, a, evaluate, shell_step(folder, "last", f"touch {folder}/last", "evaluate"))


def test_what_comes_after_a_step_without_output_is_not_redone(tmp_path: Path) -> None:
    plan = with_evaluation(tmp_path)
    run_all(plan)
    assert set(states(plan).values()) == {"done"}
    record_path(tmp_path, "evaluate", 0, 1).unlink()
    assert states(plan) == {"a": "done", "evaluate": "to do", "last": "done"}
    run_all(plan)
    changed = judge(with_evaluation(tmp_path, "true now"), {})
    assert [changed[name].state.value for name in ("a", "evaluate", "last")] == ["done", "changed", "changed"]
    assert changed["last"].differences == ("it is made of evaluate, which changes",)


# Arrays


def sharded(folder: Path, count: int) -> Plan:
    """count jobs make shards, one joins them: the same whole for any count."""
    shards = shell_step(
        folder, "shards", f"echo part > {folder}/shards-$SLURM_ARRAY_TASK_ID", jobs=count, temporary=True,
        layout={"shards": count}, settings={},
    )  # fmt: skip
    whole = shell_step(folder, "whole", f"echo whole > {folder}/whole", "shards", settings={})
    return shell_plan(folder, shards, whole)


def test_only_missing_jobs_of_an_array_are_to_do(tmp_path: Path) -> None:
    plan = sharded(tmp_path, 4)
    for task in (0, 2):
        assert run_step(plan, "shards", task)[0] == 0
    verdict = judge(plan, {})["shards"]
    assert (verdict.state.value, verdict.tasks) == ("to do", (1, 3))
    active = {"shards": [ActiveJob("12", 3, "RUNNING", "None")]}
    assert judge(plan, active)["shards"].tasks == (1,)
    active["shards"].append(ActiveJob("13", 1, "PENDING", "Priority"))
    assert judge(plan, active)["shards"].state.value == "active"


def test_of_an_array_the_failed_job_is_told_first(tmp_path: Path) -> None:
    plan = sharded(tmp_path, 3)
    for task in range(3):
        run_step(plan, "shards", task)
    (tmp_path / "shards-0").unlink()
    verdict = judge(plan, {})["shards"]
    assert verdict.was_done and not verdict.failed and "shards-0 is missing" in verdict.note
    path = record_path(tmp_path, "shards", 2, 3)
    path.write_text(path.read_text().replace('"done"', '"failed"').replace('"why": ""', '"why": "no space"'))
    verdict = judge(plan, {})["shards"]
    assert (verdict.failed, verdict.was_done, verdict.note) == (True, False, "2 of 3: no space")


def test_shards_are_not_needed_once_they_are_joined(tmp_path: Path) -> None:
    plan = sharded(tmp_path, 2)
    run_all(plan)
    for task in range(2):
        (tmp_path / f"shards-{task}").unlink()
    assert states(plan) == {"shards": "not needed", "whole": "done"}
    assert states(sharded(tmp_path, 5)) == {"shards": "not needed", "whole": "done"}
    (tmp_path / "whole").unlink()
    assert states(plan) == {"shards": "to do", "whole": "to do"}


def test_another_number_of_shards_before_they_are_joined_is_refused(tmp_path: Path) -> None:
    plan = sharded(tmp_path, 2)
    run_step(plan, "shards", 0)
    other = sharded(tmp_path, 3)
    verdicts = judge(other, {})
    assert verdicts["shards"].differences == ("shards 2 -> 3",)
    with pytest.raises(ClusterError, match="shards 2 -> 3"):
        refuse_changed(other, verdicts)
    assert places_to_clear(other, verdicts) == {"shards": [tmp_path / "shards-0"]}
    make_room(other, verdicts)
    assert judge(other, {})["shards"].tasks == (0, 1, 2)


# Steps that need no permission


def test_samples_are_built_beside_what_is_there(tmp_path: Path) -> None:
    def plan(length: int) -> Plan:
        step = shell_step(tmp_path, "a", f"touch {tmp_path}/a", settings={"length": length}, rebuilds=True)
        return shell_plan(tmp_path, step)

    run_all(plan(1))
    assert states(plan(2)) == {"a": "to do"}
    refuse_changed(plan(2), judge(plan(2), {}))


# Runs


def run_plan(folder: Path, max_steps: int = 10, **settings: Any) -> Plan:
    """A pretraining step and what is made of its run."""
    limits = {"max_steps": max_steps, "max_tokens": None}
    run = Step(
        "pretrain", (), {"training.max_steps": max_steps, **settings},
        ((Output(RUN, str(folder / "run"), limits),),), StepResources(), recipe="pretrain.yaml",
    )  # fmt: skip
    return shell_plan(folder, run, shell_step(folder, "export", f"touch {folder}/export", "pretrain", settings={}))


def begin_run(plan: Plan, checkpoint: int, **end: Any) -> None:
    """What slurm/pretrain.sbatch leaves: the record of the beginning, a history, a checkpoint."""
    order = plan.order(plan.steps[0])
    record = Record("pretrain", "begun", order.settings, order.layout, {}, order.tasks[0], job_id="24")
    record.write(record_path(plan.folder, "pretrain", 0, 1))
    run = plan.folder / "run"
    folder = run / CHECKPOINTS_DIR / step_name(checkpoint)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"step": checkpoint}))
    append_event(run, START, step=0)
    if end:
        append_event(run, END, **end)


def test_a_run_is_done_when_it_has_reached_its_limit(tmp_path: Path) -> None:
    plan = run_plan(tmp_path)
    begin_run(plan, 4, step=4, reason="stopped by signal SIGTERM", completed=False)
    verdict = judge(plan, {})["pretrain"]
    assert verdict.state.value == "to do" and "stopped at step 4 of 10 (stopped by signal SIGTERM)" in verdict.note
    assert not verdict.was_done and verdict.run_job == "24"
    status, said = run_step(plan, "export")
    assert status == 2 and "stopped at step 4 of 10" in said
    begin_run(plan, 10, step=10, reason="training.max_steps (10) reached", completed=True)
    assert states(plan) == {"pretrain": "done", "export": "to do"}
    assert run_step(plan, "export")[0] == 0


def test_a_run_may_end_by_its_tokens(tmp_path: Path) -> None:
    plan = run_plan(tmp_path)
    begin_run(plan, 6, step=6, reason="training.max_tokens (99) reached", completed=True)
    run = plan.steps[0]
    for tokens, expected in ((99, "done"), (120, "to do")):
        tasks = ((Output(RUN, run.tasks[0][0].path, {"max_steps": 10, "max_tokens": tokens}),),)
        step = Step(run.name, (), run.settings, tasks, run.resources)
        assert states(shell_plan(tmp_path, step))["pretrain"] == expected


def test_more_steps_go_on_and_concern_what_was_made_of_the_run(tmp_path: Path) -> None:
    plan = run_plan(tmp_path)
    begin_run(plan, 10, step=10, reason="training.max_steps (10) reached", completed=True)
    run_step(plan, "export")
    assert set(states(plan).values()) == {"done"}
    longer = run_plan(tmp_path, 20)
    verdicts = judge(longer, {})
    assert verdicts["pretrain"].state.value == "to do"
    assert verdicts["pretrain"].note == "goes on with training.max_steps 10 -> 20"
    assert verdicts["pretrain"].was_done
    assert verdicts["export"].differences == ("it is made of pretrain, which changes",)
    make_room(longer, verdicts)
    assert (tmp_path / "run").is_dir(), "a run that goes on stays where it is"
    assert states(longer) == {"pretrain": "to do", "export": "to do"}


@pytest.mark.parametrize(
    ("key", "unfinished"),
    [("optimizer.learning_rate", "to do"), ("data.seq_length", "changed"), ("model.x", "changed")],
)
def test_other_settings_of_a_run(tmp_path: Path, key: str, unfinished: str) -> None:
    """Before its end a run goes on where a resume would; a finished one was made otherwise."""
    begin_run(run_plan(tmp_path, **{key: 1}), 4)
    assert states(run_plan(tmp_path, **{key: 2}))["pretrain"] == unfinished
    begin_run(run_plan(tmp_path, **{key: 1}), 10)
    assert states(run_plan(tmp_path, **{key: 2}))["pretrain"] == "changed"


def test_a_setting_younger_than_the_record_had_its_default(tmp_path: Path) -> None:
    begin_run(run_plan(tmp_path), 10)
    assert states(run_plan(tmp_path, **{"optimizer.eps": 1e-6}))["pretrain"] == "done"
    assert states(run_plan(tmp_path, **{"optimizer.eps": 1e-9}))["pretrain"] == "changed"


# Jobs in the queue


def verdict_of(plan: Plan, name: str, *jobs: ActiveJob, **others: list[ActiveJob]) -> Verdict:
    return judge(plan, {name: list(jobs), **others})[name]


def test_a_job_in_the_queue_is_not_submitted_twice(tmp_path: Path) -> None:
    plan = chain(tmp_path)
    plan.order(plan.by_name["a"]).write()
    assert verdict_of(plan, "a", ActiveJob("5", None, "RUNNING", "None")).state.value == "active"
    queued = ActiveJob("6", None, "PENDING", "Dependency")
    assert verdict_of(plan, "b", queued, a=[ActiveJob("5", None, "RUNNING", "None")]).state.value == "active"


def test_a_job_that_waits_for_a_failed_one_is_replaced(tmp_path: Path) -> None:
    plan = chain(tmp_path)
    doomed = ActiveJob("6", None, "PENDING", "DependencyNeverSatisfied")
    verdict = verdict_of(plan, "b", doomed)
    assert (verdict.state.value, verdict.replaces) == ("to do", ("6",))


def test_a_job_whose_input_is_submitted_again_is_replaced(tmp_path: Path) -> None:
    """It waits for a job that has ended; it must wait for the new one."""
    plan = chain(tmp_path)
    verdict = verdict_of(plan, "b", ActiveJob("6", None, "PENDING", "Dependency"))
    assert (verdict.state.value, verdict.replaces) == ("to do", ("6",))


def test_a_job_with_other_settings_is_told(tmp_path: Path) -> None:
    plan = chain(tmp_path)
    plan.order(plan.by_name["a"]).write()
    other = chain(tmp_path, "two")
    verdicts = judge(other, {"a": [ActiveJob("5", None, "RUNNING", "None")]})
    expected = r'job 5 is at it with other settings: text "one" -> "two"(.*\n)+.*scancel 5'
    with pytest.raises(ClusterError, match=expected):
        refuse_changed(other, verdicts)
    with pytest.raises(ClusterError, match="scancel 5"):
        make_room(other, verdicts)
