"""The hook that judges checkpoints: order, rotation, resume, rollback, failures, and the end of a run."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.evaluate.during_run import DownstreamHook, check_tasks, command
from ctxlm_ds.apps.evaluate.suite import load_suite
from ctxlm_ds.checkpoint.folders import step_name
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.schema import DownstreamTask, EvaluationConfig, RunConfig
from ctxlm_ds.training.hooks.hooks import RunEnd
from tests.unit.training.hooks.test_metrics import end, metrics_of, start

JUDGE = """
import json, os, pathlib, sys, time
folder, name, how = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
assert not {"RANK", "OMPI_COMM_WORLD_SIZE"} & set(os.environ) and os.environ["CUDA_VISIBLE_DEVICES"] == ""
if how == "hang":
    time.sleep(60)
if how == "fail":
    sys.exit("error: this model is too good")
score = float((folder / "checkpoint" / "weights").read_text())
output = folder / name / "step" / name
output.mkdir(parents=True, exist_ok=True)
spread = {"accuracy": {"mean": score}}
(output / "metrics.json").write_text(json.dumps({"task": name, "chosen": {"dev": spread}}))
"""


class Run:
    """A run that saves and takes steps; `told` is what the hooks heard."""

    def __init__(self, folder: Path, how: str = "judge", tasks: tuple[str, ...] = ("cola",)) -> None:
        entries = [DownstreamTask(task=name, data="data", every_steps=2) for name in tasks]
        self.folder, self.told = folder, []
        self.how = how
        self.config = RunConfig(evaluation=EvaluationConfig(downstream=entries))
        save_minutes = self.config.watchdog.save_minutes
        self.hook = DownstreamHook(entries, save_minutes, folder, self.hear, make_command=self.judge)

    def judge(self, task: DownstreamTask, folder: Path) -> list[str]:
        return [sys.executable, "-c", JUDGE, str(folder), task.name, self.how]

    def hear(self, event: str, *values: Any) -> None:
        if event == "on_evaluation":
            self.told.append(values)

    def save(self, step: int) -> Path:
        folder = self.folder / "checkpoints" / step_name(step)
        folder.mkdir(parents=True)
        (folder / "weights").write_text(f"0.{step}")
        (folder / "manifest.json").write_text("{}")
        return folder

    def step(self, step: int) -> None:
        self.hook.on_step_end(metrics_of(step))

    def settle(self, last_step: int) -> None:
        deadline_s = time.monotonic() + 90
        while self.hook._running is not None and time.monotonic() < deadline_s:
            time.sleep(0.02)
            self.step(last_step)

    def left(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "downstream").glob("step-*/*"))


@pytest.fixture(autouse=True)
def as_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")


def test_checkpoints_are_judged_in_order_although_they_are_rotated(tmp_path: Path) -> None:
    run = Run(tmp_path, tasks=("cola", "sst2"))
    run.hook.on_run_start(start(0))
    run.step(1)
    run.step(2)
    assert run.hook._running is None
    saved = run.save(2)
    run.step(3)
    shutil.rmtree(saved)
    run.settle(3)
    assert run.told == [(2, {"downstream/cola/accuracy": 0.2}), (2, {"downstream/sst2/accuracy": 0.2})]
    run.save(5)
    run.hook.on_run_end(end(5))
    assert [step for step, _ in run.told[2:]] == [5, 5]
    assert run.left() == sorted(["cola", "cola-log.txt", "sst2", "sst2-log.txt"] * 2)


def test_a_resume_judges_what_is_missing_and_forgets_later_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, how="hang")
    run.hook.on_run_start(start(0))
    for step in (2, 4):
        run.save(step)
        run.step(step)
    run.hook.on_run_end(RunEnd("stopped", 4, 0, 0.0, completed=False))
    assert run.hook._running is None and run.told == []
    shutil.rmtree(tmp_path / "checkpoints" / step_name(2))
    again = Run(tmp_path)
    again.hook.on_run_start(start(2))
    again.settle(3)
    assert again.told == [(2, {"downstream/cola/accuracy": 0.2})] and not again.hook._queue
    assert [path.name for path in (tmp_path / "downstream").iterdir()] == [step_name(2)]
    third = Run(tmp_path)
    third.hook.on_run_start(start(2))
    assert third.hook._running is None


def test_a_reported_task_is_not_judged_again_after_a_resume(tmp_path: Path) -> None:
    run = Run(tmp_path, tasks=("cola", "sst2"))
    run.hook.on_run_start(start(0))
    run.save(2)
    run.step(2)
    while not run.told:
        time.sleep(0.02)
        run.step(3)
    run.hook.on_run_end(RunEnd("stopped", 3, 0, 0.0, completed=False))
    again = Run(tmp_path, tasks=("cola", "sst2"))
    again.hook.on_run_start(start(2))
    again.settle(3)
    assert [list(figures) for _, figures in again.told] == [["downstream/sst2/accuracy"]]


def test_a_step_is_skipped_while_an_earlier_one_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, how="hang")
    run.hook.on_run_start(start(0))
    for step in (2, 4, 6):
        run.save(step)
        run.step(step)
    assert [work.step for work in run.hook._queue] == [4] and run.left().count("checkpoint") == 2
    assert "step 6 is not judged on cola, training continues: step 4 still waits" in caplog.text
    run.hook._longest_wait_s = 0.0
    run.hook.on_run_end(end(6))
    assert [work.step for work in run.hook._queue] == [4, 6]


@pytest.mark.parametrize("broken", ["os.link", "subprocess.Popen"])
def test_an_error_of_the_system_drops_one_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("not now")

    run = Run(tmp_path)
    run.hook.on_run_start(start(0))
    with monkeypatch.context() as patched:
        patched.setattr(broken, fail)
        run.save(2)
        run.step(2)
    assert "step 2 is not judged on cola, training continues: not now" in caplog.text
    assert "checkpoint" not in run.left() and run.hook._running is None
    run.save(4)
    run.step(4)
    run.settle(5)
    assert run.told == [(4, {"downstream/cola/accuracy": 0.4})]


def test_the_end_of_a_run_does_not_wait_forever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, how="hang")
    run.hook._longest_wait_s = 0.1
    run.hook.on_run_start(start(0))
    run.save(2)
    run.step(2)
    run.hook.on_run_end(end(2))
    assert run.hook._running is None and "1 downstream evaluations are left" in caplog.text
    again = Run(tmp_path)
    again.hook.on_run_start(start(2))
    again.hook.on_run_end(end(2))
    assert [step for step, _ in again.told] == [2]


def test_a_rollback_ends_the_process_of_a_later_step(tmp_path: Path) -> None:
    run = Run(tmp_path, how="hang")
    run.hook.on_run_start(start(0))
    run.save(2)
    run.step(2)
    _, process = run.hook._running
    run.hook.on_rollback(1)
    assert process.poll() is not None and run.hook._running is None and run.left() == []


def test_a_failure_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, how="fail")
    run.hook.on_run_start(start(0))
    run.step(2)
    run.save(4)
    run.step(4)
    run.settle(5)
    assert "step 2 is not judged on cola, training continues: it was not saved" in caplog.text
    assert "step 4 is not judged on cola, training continues: error: this model is too good" in caplog.text
    assert run.told == [] and run.left() == ["cola-log.txt"]


def test_tasks_and_files_are_checked_at_the_start(tmp_path: Path) -> None:
    def config(**settings: Any) -> RunConfig:
        task = DownstreamTask(**{"task": "cola", "data": str(tmp_path), "every_steps": 2} | settings)
        return RunConfig(evaluation=EvaluationConfig(downstream=[task]))

    def check(config: RunConfig) -> None:
        check_tasks(config.evaluation.downstream, config.model.family)

    with pytest.raises(ConfigError, match="no shipped task"):
        check(config(task="cole"))
    with pytest.raises(DataError, match=r"train.tsv: no such file"):
        check(config())
    (tmp_path / "train.jsonl").write_text('{"a": "x", "b": "1"}\n')
    mine = tmp_path / "mine.yaml"
    mine.write_text("{kind: text_to_text, format: jsonl, train: train.jsonl, dev: train.jsonl, "
                    "columns: {text: a, label: b}}")  # fmt: skip
    with pytest.raises(ConfigError, match=r"no model of model.family bert for tasks of kind text_to_text \(ForSeq"):
        check(config(task=str(mine)))
    mine.write_text("{kind: regression, format: jsonl, train: train.jsonl, dev: train.jsonl, "
                    "columns: {text: a, label: b}}")  # fmt: skip
    check(config(task=str(mine)))
    words = command(config(train_layers=0, seed=3).evaluation.downstream[0], tmp_path)
    (one,) = load_suite(words[words.index("--suite") + 1])[1].tasks.values()
    assert (one.task, one.seeds, one.train_layers, one.max_train_examples) == ("cola", [3], 0, None)
    fast = config(task="minimal-pairs-fast")
    assert command(fast.evaluation.downstream[0], tmp_path)[4:6] == ["--suite", "minimal-pairs-fast"]
    with pytest.raises(DataError, match=r"train.jsonl:1: sentence_good is missing"):
        check(fast)
    with pytest.raises(ConfigError, match="minimal-pairs-fast is a suite, which has its own epochs"):
        check(config(task="minimal-pairs-fast", epochs=2))
