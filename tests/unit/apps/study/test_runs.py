"""The runs of a study: which there are, the rate that the search gives, and processes that fail or are stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from ctxlm_ds.apps.downstream.task import shipped
from ctxlm_ds.apps.study.definition import STUDY_DIR, Budget, Study, load_study
from ctxlm_ds.apps.study.runs import Job, StudyRuns, Work, execute, failure_mark
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import load_config
from tests.integration.route import wait_for
from tests.unit.apps.study.conftest import Complete

SOURCES = ("tokenizer.path=tok", "data.train=[data/x]")


def test_the_search_comes_first_and_seeds_are_paired(runs: StudyRuns, complete: Complete) -> None:
    assert [job.name for job in runs.search[:3]] == [f"few/rate-{rate}/seed-1000" for rate in (0.5, 1, 2)]
    with pytest.raises(ConfigError, match=r"the search of few lacks few/rate-0.5/seed-1000, few/rate-1/seed-1000"):
        runs.compared()
    for job in runs.search:
        complete(runs, job, 4.0 + abs(job.factor - 1.0))
    assert runs.compared()[:2] == [Job("few", 1.0, 1), Job("many", 1.0, 1)] and len(runs.compared()) == 6


def fail(runs: StudyRuns, job: Job) -> None:
    (runs.run_dir(job) / "study.json").unlink(missing_ok=True)
    failure_mark(runs.log(job)).touch()


def test_a_rate_that_failed_is_not_chosen(runs: StudyRuns, complete: Complete) -> None:
    for job in runs.search:
        complete(runs, job, 4.0 - job.factor)
    fail(runs, Job("few", 2.0, 1000))
    assert (runs.best_factor("few"), runs.best_factor("many")) == (1.0, 2.0)
    (runs.run_dir(Job("few", 1.0, 1000)) / "study.json").unlink()
    with pytest.raises(ConfigError, match="lacks few/rate-1/seed-1000; run"):  # stopped, not failed
        runs.best_factor("few")
    for job in runs.search:
        fail(runs, job)
    assert runs.best_factor("many") == 0.5


def test_a_single_rate_needs_no_search(study: Study, tmp_path: Path) -> None:
    single = StudyRuns(tmp_path, study.model_copy(update={"rates": [1.0]}), study.sizes["tiny"])
    assert single.search == [] and single.compared()[0] == Job("few", 1.0, 1)


def test_a_budget_in_seconds_takes_the_rate_of_one_run_each(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 steps of 32 rows in 20 s for `few`, in 40 s for `many`: 60 s are 150 and 75 steps, also when asked again."""
    begun: list[str] = []

    def measured(*words: object) -> None:
        run_dir = Path(next(str(word) for word in words if str(word).startswith("run_dir=")).removeprefix("run_dir="))
        begun.append(run_dir.parent.name)
        run_dir.mkdir(parents=True)
        (run_dir / "study.json").write_text(json.dumps({"seconds": 20.0 if run_dir.parent.name == "few" else 40.0}))

    monkeypatch.setattr("ctxlm_ds.apps.study.runs.run_step", measured)
    size = study.sizes["tiny"].model_copy(update={"budget": Budget(seconds=60.0)})
    for _ in range(2):
        timed = StudyRuns(tmp_path, study, size)
        for arm in study.arms:
            monkeypatch.setattr(timed, "config", lambda arm: load_config("bert-docstrings", SOURCES))
            timed._sources[arm] = list(SOURCES)
        assert [timed.steps(arm) for arm in study.arms] == [150, 75]
    assert begun == ["few", "many"]


@pytest.mark.parametrize("name", shipped(STUDY_DIR))
def test_arms_of_shipped_studies_can_be_compared(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are recipes, too."""
    path, study = load_study(name)
    assert study.claim.source and study.claim.text and "tiny" in study.sizes
    monkeypatch.setattr(StudyRuns, "_make_datasets", lambda *_: None)
    for size, settings in study.sizes.items():
        StudyRuns(tmp_path / size, study, settings).prepare(path, [])


def test_losses_of_other_tokenizers_are_refused(tmp_path: Path) -> None:
    path, study = load_study("depth-width-sharing")
    with pytest.raises(ConfigError, match="losses of different objectives or tokenizers .*shared masked_lm of albert"):
        StudyRuns(tmp_path, study.model_copy(update={"compare": "loss"}), study.sizes["tiny"]).prepare(path, [])


def test_a_batch_that_grows_gets_the_steps_of_its_budget(runs: StudyRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    grows = load_config("bert-docstrings", [*SOURCES, "training.batch_ramp=[16, 16, 10000]"])
    monkeypatch.setattr(runs, "config", lambda arm: grows)
    monkeypatch.setattr(runs, "_cost_per_row", lambda arm, unit: 50.0)
    read = [grows.training.rows_after(steps) for steps in (runs.steps("few") - 1, runs.steps("few"))]
    assert read[0] < 1_000_000 / 50 <= read[1]


def test_runs_come_after_those_whose_weights_they_take(
    study: Study, tmp_path: Path, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = study.model_dump(mode="json")
    text["arms"] |= {"later": {"starts_from": "few"}, "student": {"teacher": "later"}}
    runs = StudyRuns(tmp_path, Study.model_validate(text), study.sizes["tiny"])
    monkeypatch.setattr(runs, "config", lambda arm: load_config("bert-docstrings", SOURCES))
    begun: list[Work] = []

    def execute(work: Sequence[Work], parallel: int) -> None:
        begun.extend(work)
        for job in runs.search:
            if job.name in {one.name for one in work}:
                complete(runs, job, 4.0 - job.factor)

    monkeypatch.setattr("ctxlm_ds.apps.study.runs.execute", execute)
    for arm in runs.study.trained:
        runs._sources[arm], runs._steps[arm] = list(SOURCES), 10
    runs.train(runs.search, 1)
    assert [one.name.partition("/")[0] for one in begun] == ["few"] * 3 + ["many"] * 3 + ["later"] * 3 + ["student"] * 3
    own = f"{tmp_path / 'runs'}/{{}}/rate-2/seed-1000/hf"  # of the search, the rate with the lowest loss
    assert f"initialize_from={own.format('few')}" in begun[6].words
    assert f"teacher.path={own.format('later')}" in begun[9].words
    assert f"initialize_from={own.format('few').replace('1000', '2')}" in runs.command(Job("later", 1.0, 2))
    begun.clear()
    complete(runs, Job("few", 2.0, 1), 4.0)
    runs.train([Job("later", 1.0, 1), Job("later", 1.0, 2)], 1)  # the other one's first run is missing
    assert [one.name for one in begun] == ["later/rate-1/seed-1"]
    mark = failure_mark(runs.log(Job("later", 1.0, 2)))
    assert not mark.exists()  # another task of an array may still train it
    failure_mark(runs.log(Job("few", 2.0, 2))).touch()
    runs.train([Job("later", 1.0, 2)], 1)
    assert len(begun) == 1 and mark.exists()


def work(tmp_path: Path, name: str, code: str) -> Work:
    return Work(name, [sys.executable, "-c", code], tmp_path / "logs" / f"{name}.log")


def test_a_process_that_fails_leaves_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    execute([work(tmp_path, "bad", "raise SystemExit(3)"), work(tmp_path, "good", "print('done')")], 1)
    assert (tmp_path / "logs" / "good.log").read_text() == "done\n"
    assert "bad: failed (exit status 3)" in caplog.text and "good: failed" not in caplog.text
    assert [path.name for path in (tmp_path / "logs").glob("*.failed")] == ["bad.log.failed"]
    execute([work(tmp_path, "bad", "pass")], 1)
    assert not list((tmp_path / "logs").glob("*.failed"))


def begin(tmp_path: Path, handler: str) -> subprocess.Popen[bytes]:
    """Start a study with one process, which has this handler of SIGTERM and has begun."""
    (tmp_path / "child.py").write_text(
        f"import pathlib, signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, {handler})\n"
        "inner = subprocess.Popen(['sleep', '300'])\npathlib.Path('inner').write_text(str(inner.pid))\n"
        "pathlib.Path('begun').touch()\ntime.sleep(60)\n"
    )
    code = ("from pathlib import Path\nimport sys\nfrom ctxlm_ds.apps.study.runs import Work, execute\n"
            "execute([Work('one', [sys.executable, 'child.py'], Path('one.log'))], 1)")  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ})
    wait_for((tmp_path / "begun").exists, 90, "the process of the study")
    return process


def runs_inside(tmp_path: Path) -> bool:
    """Whether the process inside the one of the study is alive."""
    inner = int((tmp_path / "inner").read_text())
    return psutil.pid_exists(inner) and psutil.Process(inner).status() != psutil.STATUS_ZOMBIE


def test_a_signal_reaches_the_processes_and_ends_the_study(tmp_path: Path) -> None:
    process = begin(tmp_path, "lambda *_: (pathlib.Path('stopped').touch(), sys.exit(0))")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert (tmp_path / "stopped").exists() and not runs_inside(tmp_path)


def test_a_second_signal_kills_a_process_that_hangs(tmp_path: Path) -> None:
    process = begin(tmp_path, "lambda *_: pathlib.Path('ignored').touch()")
    process.send_signal(signal.SIGTERM)
    wait_for((tmp_path / "ignored").exists, 90, "the signal")
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM and not runs_inside(tmp_path)
