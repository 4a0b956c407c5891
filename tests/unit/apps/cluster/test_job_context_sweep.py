"""Sweeps of ctxlm_ds.apps.cluster.job_context: which settings a task of an array has."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.apps.cluster.job_context import MAX_TASKS, of_task, read_sweep, tasks_of_array
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import load_config

WORDS = ("bert-base", "--sweep", "{}", "--set", "a.b=1")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    file = tmp_path / "sweep.txt"
    file.write_text("# learning rates\noptimizer.lr=1e-4\n\n'data.train=[a, b]' optimizer.lr=2e-4  # two sources\n")
    return file


def test_each_line_is_a_task_with_a_run_of_its_own(sweep: Path) -> None:
    words = [word.format(sweep) for word in WORDS]
    own = ["data.train=[a, b]", "optimizer.lr=2e-4", f"run_dir={sweep.parent}/1"]
    found = of_task(words, {"SLURM_ARRAY_TASK_ID": "1"})
    assert found == ("bert-base", "--set", "a.b=1", "--set", *own)
    assert of_task(WORDS[:1], {}) == WORDS[:1]


def test_the_run_directory_of_the_command_is_the_task_s(
    sweep: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The user has not replaced it, so no note says so."""
    caplog.set_level("INFO", "ctxlm_ds")
    (tmp_path / "tiny.yaml").write_text("name: tiny\n")
    words = ["tiny", "--sweep", str(sweep), "--set", f"run_dir={tmp_path}", "training.seed=2"]
    found = of_task(words, {"SLURM_ARRAY_TASK_ID": "0"})
    config = load_config(tmp_path / "tiny.yaml", [word for word in found if word.startswith(("run_dir=", "training."))])
    assert (config.run_dir, config.training.seed, caplog.text) == (f"{tmp_path}/0", 2, "")
    load_config(tmp_path / "tiny.yaml", ["run_dir=a", "run_dir=b"])
    assert "replaces" in caplog.text


@pytest.mark.parametrize(("task", "told"), [("2", "the tasks 0 to 1"), ("", "needs an array")])
def test_a_job_that_is_no_task_is_refused(sweep: Path, task: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        of_task([word.format(sweep) for word in WORDS], {"SLURM_ARRAY_TASK_ID": task})


@pytest.mark.parametrize(
    ("text", "told"),
    [("# none\n", "no line"), ("\na.b 1\n", r"a.txt:2: a.b: a line"), ("run_dir=x\n", "run_dir=x"),
     ("--set a=1\n", "--set:"), ("a='b\n", "a.txt:1: No closing quotation")],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_sweep(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match="none.txt: missing"):
        read_sweep(tmp_path / "none.txt")


def test_ranges_of_an_array_are_not_listed(tmp_path: Path) -> None:
    assert tasks_of_array("0-999999999,5,8-9:2%4") == [range(1_000_000_000), range(5, 6), range(8, 10, 2)]
    for text in ("", "x", "1-", "0-" + "9" * 5000, "1:2"):
        with pytest.raises(ConfigError, match="--array=.*: expected numbers and ranges") as refused:
            tasks_of_array(text)
        assert len(str(refused.value)) < 200
    (tmp_path / "long.txt").write_text("a=1\n" * (MAX_TASKS + 1))
    with pytest.raises(ConfigError, match="long.txt: more than 10,000 tasks"):
        read_sweep(tmp_path / "long.txt")
    (tmp_path / "latin.txt").write_bytes(b"name=\xe9\n")
    with pytest.raises(ConfigError, match="latin.txt: cannot be read as UTF-8"):
        read_sweep(tmp_path / "latin.txt")
    (tmp_path / "one.txt").write_text("name=a\u2028run_dir=b seed=1\r\n")
    assert [task.settings for task in read_sweep(tmp_path / "one.txt")] == [["name=a\u2028run_dir=b", "seed=1"]]
