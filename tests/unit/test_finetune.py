"""The form in which a task is run, from the command's options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ctxlm_ds.apps.downstream.results import Point
from ctxlm_ds.apps.downstream.task import load_task
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.finetune import choose_form, main, parse_arguments

NEEDED = ["--model", "m", "--data", "d", "--output", "o"]


@pytest.mark.parametrize(
    ("task", "options", "form"),
    [
        ("mrpc", [], (None, {})),
        ("mrpc", ["--text-to-text", "--beams", "4"], ("text_to_text", {"beams": 4})),
        ("nq-open", [], ("text_to_text", {"beams": 1})),
        ("race", ["--gpt1-inputs", "--lm-weight", "0"], ("gpt1_inputs", {"lm_weight": 0.0})),
        ("conll2003-ner", ["--crf"], ("crf", {"train_on": "first", "read_from": "first"})),
    ],
)
def test_forms_and_their_options(task: str, options: list[str], form: object) -> None:
    arguments = parse_arguments(["--task", task, *NEEDED, *options])
    assert choose_form(load_task(task)[1], arguments) == form


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--crf", "--gpt1-inputs"], "--gpt1-inputs and --crf exclude each other"),
        (["--beams", "2"], "--beams: only with --text-to-text"),
        (["--train-on", "all"], "--train-on all: only for tasks of kind tagging"),
        (["--text-to-text", "--read-from", "sum"], "--read-from sum: only for tasks of kind tagging"),
        (["--lm-weight", "1"], "--lm-weight: only with --gpt1-inputs"),
    ],
)
def test_options_without_their_form_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_form(load_task("mrpc")[1], parse_arguments(["--task", "mrpc", *NEEDED, *options]))


@pytest.mark.parametrize(
    ("options", "epochs"),
    [([], [25.0]), (["--batch-sizes", "8", "16"], [13.0]), (["--max-train-examples", "20"], [50.0]),
     (["--epochs", "2"], [2.0]), (["--published-grid"], [2.0, 3.0, 4.0])],
)  # fmt: skip
def test_a_small_task_is_trained_for_200_steps_by_default(
    tmp_path: Path, options: list[str], epochs: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: dict[str, object] = {}

    def run(
        arguments: object, task: object, form: object, settings: object, folders: dict[Point, Path], _: object
    ) -> None:
        trained["epochs"] = sorted({point.epochs for point in folders})
        raise KeyboardInterrupt

    monkeypatch.setattr("ctxlm_ds.finetune._run_points", run)
    for name, count in (("t", 256), ("d", 10)):
        (tmp_path / f"{name}.tsv").write_text("".join(f"text {number}\tgood\n" for number in range(count)))
    description = (
        "kind: classification\ntrain: t.tsv\ndev: d.tsv\nformat: tsv\nheader: false\ncolumns: {text: 0, label: 1}\n"
    )
    (tmp_path / "mine.yaml").write_text(description)
    with pytest.raises(KeyboardInterrupt):
        main(["--task", str(tmp_path / "mine.yaml"), "--model", "m", "--output", str(tmp_path / "out"), *options])
    assert trained["epochs"] == epochs


def test_only_the_files_of_a_shipped_task_need_a_folder(tmp_path: Path) -> None:
    rest = ["--model", str(tmp_path), "--output", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match="--data: give the folder with the files of mrpc"):
        main(["--task", "mrpc", *rest])
    description = "kind: classification\ntrain: t.tsv\ndev: d.tsv\nformat: tsv\ncolumns: {text: a, label: b}\n"
    (tmp_path / "mine.yaml").write_text(description)
    with pytest.raises(DataError, match=re.escape(str(tmp_path / "t.tsv"))):
        main(["--task", str(tmp_path / "mine.yaml"), *rest])


def test_batches_that_the_ranks_cannot_divide_are_refused_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    description = "kind: classification\ntrain: t.tsv\ndev: d.tsv\nformat: tsv\ncolumns: {text: a, label: b}\n"
    (tmp_path / "mine.yaml").write_text(description)
    words = ["--task", str(tmp_path / "mine.yaml"), "--model", str(tmp_path), "--output", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match="--batch-sizes 30: not a multiple of the 4 devices"):
        main([*words, "--epochs", "1", "--batch-sizes", "16", "30"])
