"""What sbatch is told, what squeue's answer means, and what a person reads; the rest is tested on a real cluster."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from ctxlm_ds.cluster import pipeline
from ctxlm_ds.cluster.pipeline import print_table, status_rows
from ctxlm_ds.cluster.pipeline_jobs import (
    SEPARATOR,
    ActiveJob,
    Submitted,
    job_name,
    newest_ids,
    note_submitted,
    parse_queue,
    read_submitted,
)
from ctxlm_ds.cluster.pipeline_submit import Submission, Submitter, sbatch_options
from ctxlm_ds.cluster.pipeline_verdict import State, Verdict, judge
from ctxlm_ds.cluster.successor import moved_dependency
from tests.unit.cluster.pipelines import recipe_plan, run_step, shell_plan, shell_step


def test_resources_become_options(tmp_path: Path) -> None:
    resources = {
        "default": {"partition": "main", "time": "1:00:00", "extra": ["--qos=long"]},
        "preprocess": {"cpus": 3, "memory": "8G"},
        "pretrain": {"nodes": 2, "ntasks_per_node": 4, "gpus_per_node": 4, "time": "2-0", "extra": ["--exclusive"]},
    }
    phases = [{"set": ["training.max_steps=5"], "resources": {"nodes": 4}}]
    section = {"resources": resources, "phases": phases, "workers": 2}
    plan = recipe_plan(tmp_path, section, training={"micro_batch_size": 4})
    options = {step.name: sbatch_options(step.resources) for step in plan.steps}
    usual = ["--time=1:00:00", "--partition=main", "--qos=long"]
    assert options["tokenizer"] == ["--cpus-per-task=2", *usual]
    assert options["preprocess"] == ["--cpus-per-task=3", "--mem=8G", *usual]
    assert options["export"] == usual
    ranks = ["--ntasks-per-node=4", "--gpus-per-node=4", "--time=2-0", "--partition=main", "--qos=long", "--exclusive"]
    assert options["pretrain"] == ["--nodes=2", *ranks]
    assert options["pretrain-2"] == ["--nodes=4", *ranks]


def submissions(folder: Path, jobs: dict[str, list[ActiveJob]], **section: object) -> dict[str, Submission]:
    """What would be submitted of the tiny recipe."""
    plan = recipe_plan(folder, section)
    found = Submitter(plan, judge(plan, jobs), jobs).preview()
    return {submission.step.name: submission for submission in found}


def option(submission: Submission, name: str) -> str | None:
    """The value of one of sbatch's options."""
    return next((word.split("=", 1)[1] for word in submission.words if word.startswith(f"--{name}=")), None)


def test_each_step_waits_for_what_it_needs(tmp_path: Path) -> None:
    found = submissions(tmp_path, {}, shards=4, shards_at_once=2)
    assert {name: option(submission, "dependency") for name, submission in found.items()} == {
        "tokenizer": None,
        "preprocess": "afterok:<tokenizer>",
        "merge": "afterok:<preprocess>",
        "preprocess-heldout": "afterok:<tokenizer>",
        "samples": "afterok:<merge>:<preprocess-heldout>",
        "pretrain": "afterok:<merge>:<samples>",
        "export": "afterok:<pretrain>",
    }
    assert option(found["preprocess"], "array") == "0-3%2" and option(found["preprocess"], "output") == str(
        tmp_path / "out" / "logs" / "preprocess-%A_%a.log"
    )
    assert all(("--kill-on-invalid-dep=yes" in s.words) == bool(s.waits_for) for s in found.values())
    assert found["pretrain"].words[-1] == str(tmp_path / "out" / "steps" / "pretrain.yaml")
    assert found["merge"].words[-1] == str(tmp_path / "out" / "steps" / "merge.order.json")


def test_jobs_in_the_queue_are_waited_for(tmp_path: Path) -> None:
    """Of shards that were submitted twice (some had failed) both; of a run and its successor the successor."""
    shards = [ActiveJob("7", 0, "RUNNING", "None"), ActiveJob("9", 3, "RUNNING", "None")]
    jobs = {
        "tokenizer": [ActiveJob("5", None, "RUNNING", "None")],
        "preprocess": [*shards, ActiveJob("7", 1, "RUNNING", "None"), ActiveJob("9", 2, "PENDING", "Resources")],
        "pretrain": [ActiveJob("10", None, "RUNNING", "None"), ActiveJob("11", None, "PENDING", "Dependency")],
    }
    found = submissions(tmp_path, jobs, shards=4)
    assert set(found) == {"merge", "preprocess-heldout", "samples", "export"}
    assert option(found["merge"], "dependency") == "afterok:7:9"
    assert option(found["preprocess-heldout"], "dependency") == "afterok:5"
    assert option(found["export"], "dependency") == "afterok:11"


def test_the_queue_is_read_by_names(tmp_path: Path) -> None:
    plan = recipe_plan(tmp_path, {"shards": 4, "phases": [{"set": ["training.max_steps=5"]}]})
    other = recipe_plan(tmp_path / "..", {"output_dir": str(tmp_path / "other")})
    assert job_name(plan, "merge") != job_name(other, "merge")

    def line(number: str, state: str, reason: str, name: str) -> str:
        return SEPARATOR.join((number, state, reason, name))

    found = parse_queue(
        plan,
        [
            line("12_3", "PENDING", "JobArrayTaskLimit", job_name(plan, "preprocess")),
            line("12_0", "RUNNING", "None", job_name(plan, "preprocess")),
            line("9", "RUNNING", "None", job_name(plan, "pretrain-2") + "-0badcafe"),  # one with a successor
            line("10", "PENDING", "Dependency", job_name(plan, "pretrain-2") + "-0badcafe"),
            line("13", "RUNNING", "None", job_name(other, "merge")),
            line("14", "RUNNING", "None", "something"),
            "",
        ],
    )
    assert {name: [(job.job_id, job.task) for job in jobs] for name, jobs in found.items()} == {
        "preprocess": [("12", 0), ("12", 3)],
        "pretrain-2": [("9", None), ("10", None)],
    }
    assert newest_ids(plan.by_name["pretrain-2"], found) == ["10"]
    assert found["preprocess"][1].waits and not found["preprocess"][0].waits


def test_submissions_are_remembered(tmp_path: Path) -> None:
    plan = recipe_plan(tmp_path)
    assert read_submitted(plan.folder) == {}
    note_submitted(plan, plan.by_name["tokenizer"], "5", [0], "/x/logs/tokenizer-%j.log")
    note_submitted(plan, plan.by_name["preprocess"], "6", [0, 2], "/x/logs/preprocess-%A_%a.log")
    found = read_submitted(plan.folder)
    assert found["tokenizer"].log_file() == "/x/logs/tokenizer-5.log"
    assert found["preprocess"].tasks == (0, 2) and found["preprocess"].log_file() == "/x/logs/preprocess-6_*.log"
    (plan.folder / "pipeline.json").write_text('{"steps": {"tok')
    assert read_submitted(plan.folder) == {}


def test_the_table_says_where_to_look(tmp_path: Path) -> None:
    plan = recipe_plan(tmp_path)
    log = tmp_path / "tokenizer-5.log"
    log.touch()
    verdicts = judge(plan, {"export": [ActiveJob("9", None, "PENDING", "Dependency")]})
    verdicts["tokenizer"] = Verdict("tokenizer", State.TO_DO, (0,), "ended with status 2: python", failed=True)
    verdicts["samples"] = Verdict("samples", State.TO_DO, (0,), "not made yet")
    submitted = {"tokenizer": Submitted("5", (0,), str(tmp_path / "tokenizer-%j.log"), 0.0)}
    out = io.StringIO()
    print_table(status_rows(plan, verdicts, submitted, {"samples": "TIMEOUT"}), "title", out)
    lines = {line.split()[0]: line for line in out.getvalue().splitlines()}
    assert lines["tokenizer"].split(maxsplit=3)[1:] == ["failed", "5", f"ended with status 2: python; log: {log}"]
    assert lines["samples"].split()[1] == "timeout"
    assert lines["preprocess"].split(maxsplit=1)[1] == "to do         not made yet"
    assert re.split(r"\s{2,}", lines["export"])[1:] == [
        "waiting", "its job waits for pretrain, to be submitted again",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ended", "word", "log"),
    [("COMPLETED", "to do", False), ("", "to do", False), ("TIMEOUT", "timeout", True), ("FAILED", "failed", True)],
)
def test_what_was_done_and_is_gone_has_not_failed(tmp_path: Path, ended: str, word: str, log: bool) -> None:
    """Slurm knows of the last job: of the one that made it, or of a later one that did not make it again."""
    plan = shell_plan(tmp_path, shell_step(tmp_path, "a", f"touch {tmp_path}/a"))
    assert run_step(plan, "a")[0] == 0
    (tmp_path / "a").unlink()
    (tmp_path / "a-7.log").touch()
    submitted = {"a": Submitted("7", (0,), str(tmp_path / "a-%j.log"), 0.0)}
    reason = f"{tmp_path}/a is missing or not whole"
    remark = f"{reason}; log: {tmp_path}/a-7.log" if log else reason
    assert status_rows(plan, judge(plan, {}), submitted, {"a": ended}) == [("a", word, "7", remark)]


@pytest.mark.parametrize(("began", "expected"), [("", "9"), ("7", "9"), ("10", "10")])
def test_the_end_of_a_run_is_that_of_its_last_job(began: str, expected: str) -> None:
    """The first one of a line of successors ends well, whatever becomes of the others."""
    assert pipeline.last_job(Verdict("pretrain", State.TO_DO, run_job=began), "9") == expected


def test_where_nothing_is_there_the_status_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A relative folder, looked for from the wrong directory, is not a fresh pipeline."""
    monkeypatch.setattr(pipeline, "has_slurm", lambda: False)
    monkeypatch.chdir(tmp_path)
    plan = recipe_plan(tmp_path, {"output_dir": "here"})
    pipeline.show_status(plan)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"nothing has been submitted or made in {tmp_path}/here yet")
    assert not (tmp_path / "here").exists()
    note_submitted(plan, plan.by_name["tokenizer"], "5", [0], "/x/logs/tokenizer-%j.log")
    pipeline.show_status(plan)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(plan.steps)


@pytest.mark.parametrize(
    ("dependency", "expected"),
    [
        ("afterok:24(unfulfilled)", "afterok:29"),
        ("afterok:2(unfulfilled),afterok:24(unfulfilled)", "afterok:2,afterok:29"),
        ("afterok:24(unfulfilled),afterany:7_*(unfulfilled)", "afterok:29,afterany:7"),
        ("afterok:24(failed)", "afterok:29"),
        ("afterok:240(unfulfilled)", None),
        ("singleton(unfulfilled)", None),
        ("(null)", None),
        ("", None),
    ],
)
def test_a_dependency_on_a_job_becomes_one_on_its_successor(dependency: str, expected: str | None) -> None:
    assert moved_dependency(dependency, "24", "29") == expected
