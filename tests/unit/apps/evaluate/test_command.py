"""A suite from models to a table: pairs and fine-tuning, checkpoints of a run, second runs, and errors."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ctxlm_ds import finetune
from ctxlm_ds.apps.evaluate import command, scorers
from ctxlm_ds.apps.evaluate.command import main
from ctxlm_ds.apps.evaluate.compare import main as compare
from ctxlm_ds.apps.evaluate.pairs import outcomes_of, read_pairs, score_pairs
from ctxlm_ds.apps.evaluate.suite import entries_of, load_suite
from ctxlm_ds.errors import ConfigError, CtxlmError, DataError
from tests.checkpoints import make_config, make_tokenizer, random_weights, write_run
from tests.downstream_models import sentiment, write_bert, write_gpt2, write_task

PAIRS = [("order", "the film was good .", "the film good was ."), ("order", "Ann met a film .", "Ann a film met ."),
         ("word", "who was good ?", "who in good ?"), ("word", "the film .", "the film .")]  # fmt: skip
TUNED = {"task": "mine.yaml", "files": "data", "epochs": 1, "batch_size": 8, "learning_rate": 1e-3}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_task(tmp_path, sentiment(16)[1], sentiment(8)[1])
    write_pairs(tmp_path / "pairs.jsonl", PAIRS)
    return tmp_path


def write_pairs(path: Path, pairs: list[tuple[str, str, str]]) -> None:
    rows = [{"UID": name, "linguistics_term": "all", "sentence_good": good, "sentence_bad": bad}
            for name, good, bad in pairs]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def suite(folder: Path, **tasks: dict[str, Any]) -> list[str]:
    (folder / "suite.yaml").write_text(json.dumps({"tasks": tasks, "source": "a paper"}))
    return ["--suite", str(folder / "suite.yaml"), "--data", str(folder), "--output", str(folder / "out")]


def points(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.glob("out/*/*/points/*/*")}


def test_one_table_of_pairs_and_fine_tuning(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [str(write_bert(data / "bert")), f"other={write_gpt2(data / 'gpt')}"]
    options = suite(data, pairs={"task": "minimal-pairs", "files": "pairs.jsonl", "published": {"GPT-2": 0.8}},
                    mine=TUNED | {"seeds": [1, 2]})  # fmt: skip
    main([*models, *options])
    assert "a paper" in capsys.readouterr().out
    found = {(one["model"], one["task"]): one for one in json.loads((data / "out" / "table.json").read_text())}
    pairs = read_pairs(data / "pairs.jsonl")
    for name, path in (("bert", data / "bert"), ("other", data / "gpt")):
        outcomes = outcomes_of(score_pairs(scorers.open_scorer(path), pairs))
        row = found[name, "pairs"]
        assert row["mean"] == pytest.approx((outcomes[:2].mean() + outcomes[2:].mean()) / 2) and outcomes[3] == 0.5
        assert (row["ties"], row["examples"], row["definition"]) == (0.25, 4, "babylm")
        assert row["ties_right"] == row["mean"] + 0.125 and row["interval_low"] <= row["mean"] <= row["interval_high"]
        assert row["groups"]["paradigms"]["word"]["accuracy"] == outcomes[2:].mean()
        assert row["groups"]["phenomena"]["all"]["pairs"] == 4
    task = ["--task", str(data / "mine.yaml"), "--data", str(data / "data"), "--output", str(data / "plain")]
    finetune.main([*task, "--model", models[0], "--epochs", "1", "--batch-sizes", "8", "--learning-rates", "1e-3",
                   "--seeds", "1", "2"])  # fmt: skip
    plain = json.loads((data / "plain" / "metrics.json").read_text())["chosen"]["dev"]["accuracy"]
    tuned = found["bert", "mine"]
    assert [tuned[key] for key in plain if key != "median"] == [plain[key] for key in plain if key != "median"]
    assert (tuned["seeds"], tuned["examples"], tuned["metric"]) == (2, 8, "accuracy")
    assert found["GPT-2 (published)", "pairs"]["source"] == "a paper"
    assert len(list(csv.reader((data / "out" / "table.csv").open()))) == 6
    page = (data / "out" / "report.html").read_text()
    assert "pairs: paradigms" in page and "<td>word</td>" in page
    capsys.readouterr()
    compare([str(data / "out")])
    assert capsys.readouterr().out.count("pairs ") == 3


def test_a_second_run_repeats_nothing_and_a_killed_one_continues(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, done = str(write_bert(data / "bert")), []
    options = [model, *suite(data, pairs={"task": "minimal-pairs", "files": "pairs.jsonl"}, mine=TUNED)]
    with monkeypatch.context() as patched:

        def stop_after_one(job: command.Job, examples: Any, real: Any = command.finish) -> None:
            if done:
                raise KeyboardInterrupt
            done.append(real(job, examples))

        patched.setattr(command, "finish", stop_after_one)
        with pytest.raises(KeyboardInterrupt):
            main(options)
    first = points(data)
    assert first and not any("/mine/" in path for path in first)
    main(options)
    second = points(data)
    assert first.items() < second.items()
    table = (data / "out" / "table.json").read_text()
    monkeypatch.setattr(scorers, "open_scorer", None)
    monkeypatch.setattr(command, "interval_of", None)
    main(options)
    assert points(data) == second and (data / "out" / "table.json").read_text() == table
    with pytest.raises(ConfigError, match="definition babylm -> minicons; choose another --output"):
        main([*options, "--definition", "minicons"])
    write_pairs(data / "pairs.jsonl", PAIRS[:3])
    with pytest.raises(ConfigError, match="sentences .* -> .*; choose another --output"):
        main(options)


def test_results_of_an_earlier_export_are_refused(data: Path) -> None:
    model = write_bert(data / "bert")
    options = [str(model), *suite(data, pairs={"task": "minimal-pairs", "files": "pairs.jsonl"})]
    for step in (1, 1, 2):
        (model / "exported_from.json").write_text(json.dumps({"checkpoint": f"step-{step}"}))
        if step == 1:
            main(options)
    with pytest.raises(ConfigError, match="checkpoint step-1 -> step-2; choose another --output"):
        main(options)


def test_an_interval_is_that_of_its_scores(data: Path) -> None:
    """Also where the points of an older result were removed, as the error says."""
    options = [str(write_bert(data / "bert")), *suite(data, pairs={"task": "minimal-pairs", "files": "pairs.jsonl"})]
    result = data / "out" / "bert" / "pairs" / "metrics.json"

    def interval() -> list[float]:
        main(options)
        return json.loads(result.read_text())["interval"]

    before = interval()
    write_pairs(data / "pairs.jsonl", [PAIRS[0]] * 2)
    shutil.rmtree(result.with_name("points"))
    after = interval()
    shutil.rmtree(data / "out")
    assert after == interval() != before


def test_the_first_pairs_of_each_paradigm(data: Path) -> None:
    write_pairs(data / "pairs.jsonl", [PAIRS[0], PAIRS[2], PAIRS[1], PAIRS[3]])
    (data / "suite.yaml").write_text("tasks: {pairs: {task: minimal-pairs, files: pairs.jsonl, first_pairs: 1}}")
    (entry,) = entries_of(*load_suite(str(data / "suite.yaml")), data)
    assert [pair[:3] for pair in command.read_examples(entry)] == [(*PAIRS[at][1:], PAIRS[at][0]) for at in (0, 2)]


def test_every_step_of_a_run_is_a_curve(data: Path) -> None:
    config = make_config("bert", make_tokenizer("wordpiece", data / "tokenizer"))
    run = data / "mine"
    write_run(run, config, random_weights(config), (100, 200))
    options = suite(data, pairs={"task": "minimal-pairs", "files": "pairs.jsonl"})
    main([str(run), *options, "--every-step"])
    found = [one["model"] for one in json.loads((data / "out" / "table.json").read_text())]
    assert found == ["mine-step-00000100", "mine-step-00000200"]
    assert "pairs: accuracy by step" in (data / "out" / "report.html").read_text()
    exports = {path: path.stat().st_mtime_ns for path in data.glob("out/exports/*/hf/*")}
    main([f"whole={run}", str(run / "checkpoints" / "step-00000100"), *options])
    assert {path.parent.parent.name for path in data.glob("out/exports/*/hf/*")} >= {"whole-step-00000200"}
    assert exports.items() <= {path: path.stat().st_mtime_ns for path in data.glob("out/exports/*/hf/*")}.items()


def test_points_in_processes_give_the_same_and_a_task_starts_from_another(data: Path) -> None:
    model = str(write_bert(data / "bert"))
    options = suite(data, late=TUNED | {"start": "early"}, early=TUNED | {"seeds": [1, 2]})
    with pytest.raises(ConfigError, match="late starts from early, which has no model yet"):
        main([model, *options, "--point", "2"])
    main([model, *options, "--point", "1"])
    assert [Path(path).parent.name[-5:] for path in points(data) if path.endswith("metrics.json")] == ["seed2"]
    main([model, *options, "--jobs", "2"])
    found = (data / "out" / "bert" / name / "metrics.json" for name in ("early", "late"))
    early, late = (json.loads(path.read_text()) for path in found)
    assert early["chosen"]["seeds"] == [1, 2] and late["chosen"]["seeds"] == [1]
    (tuned,) = data.glob("out/bert/early/points/*seed1/model/model.safetensors")
    (start,) = (data / "out" / "bert" / "early" / "points").glob("*-seed1/start")
    begun = load_file(start / "model.safetensors")
    weights = load_file(tuned)
    assert begun and all((weights[f"bert.{name}"] == value).all() for name, value in begun.items())
    assert not any("classifier" in name for name in begun)
    with pytest.raises(ConfigError, match="--point 3: the suite has the points 0 to 2"):
        main([model, *options, "--point", "3"])


def be_killed(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_one_error(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run", be_killed)
    with pytest.raises(CtxlmError, match="--jobs 2: a process was killed, perhaps for memory"):
        main([str(write_bert(data / "bert")), *suite(data, early=TUNED | {"seeds": [1, 2]}), "--jobs", "2"])


def test_what_is_wrong_is_one_error_before_a_model_is_loaded(data: Path) -> None:
    model = write_bert(data / "bert")
    pairs = {"task": "minimal-pairs", "files": "pairs.jsonl"}
    options = suite(data, pairs=pairs, mine=TUNED)
    with pytest.raises(ConfigError, match="none: no such folder; give a run"):
        main([str(data / "none"), *options])
    with pytest.raises(ConfigError, match="bert: no name, or that of two models"):
        main([str(model), str(model), *options])
    with pytest.raises(ConfigError, match="--every-step is for runs"):
        main([str(model), *options, "--every-step"])
    with pytest.raises(ConfigError, match="--definition lm-eval: .* is scored by babylm"):
        main([str(model), *options, "--definition", "lm-eval"])
    choice = {"kind": "multiple_choice", "format": "jsonl", "train": "c", "dev": "c"}
    (data / "choice.yaml").write_text(json.dumps(choice | {"columns": {"text": "a", "choices": "b", "label": "c"}}))
    (data / "c").write_text('{"a": "x", "b": ["y", "z"], "c": 0}\n')
    with pytest.raises(ConfigError, match="no model of type gpt2 for tasks of kind multiple_choice"):
        main([str(write_gpt2(data / "gpt")), *suite(data, mine=TUNED, choice={"task": "choice.yaml"})])
    with (data / "pairs.jsonl").open("a") as file:
        file.write('{"sentence_good": "x"}\n')
    (model / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"pairs.jsonl:5: sentence_bad is missing"):
        main([str(model), *suite(data, mine=TUNED, pairs=pairs)])
    (data / "data" / "dev.tsv").write_text("text\tlabel\nx\n")
    with pytest.raises(DataError, match=r"dev.tsv:2: 1 columns"):
        main([str(model), *suite(data, mine=TUNED)])
    assert not (data / "out").exists()
