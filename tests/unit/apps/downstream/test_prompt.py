"""Descriptions of prompts and the command: what is shipped fits its task; results, the table, each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.language_model import content_free
from ctxlm_ds.apps.downstream.prompt import PROMPT_DIR, PromptDescription, draw_examples, load_prompt, main
from ctxlm_ds.apps.downstream.task import load_task, shipped
from ctxlm_ds.apps.evaluate.compare import read_runs
from ctxlm_ds.errors import ConfigError
from tests.downstream_models import sentiment, write_bert, write_task

EXAMPLE = Example("f:1", "a {pair} film", "it moves", choices=("x", "y"))


def test_results_are_those_of_a_fine_tuning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bert(tmp_path / "model")
    examples = sentiment(12)[1]
    options = write_task(tmp_path, examples, examples[:8])
    (tmp_path / "prompt.yaml").write_text("pattern: '{text} a {mask} film'\nwords: {bad: bad, good: good}\n")
    command = [*options, "--prompt", str(tmp_path / "prompt.yaml"), "--model", str(tmp_path / "model"),
               "--output", str(tmp_path / "out"), "--shots", "1", "--seeds", "1", "2"]  # fmt: skip
    capsys.readouterr()  # what making the model has said
    main(command)
    shown = capsys.readouterr().out
    main(command)
    assert capsys.readouterr().out == shown and "accuracy" in shown
    (run,) = read_runs(str(tmp_path / "out"))
    assert run.place == ("model, 1 shot", "mine") and run.record["seeds"] > 1
    lines = (tmp_path / "out" / "points" / "shots1-seed2" / "dev_predictions.jsonl").read_text().splitlines()
    right = [json.loads(line)["right"] for line in lines]
    point = json.loads((tmp_path / "out" / "points" / "shots1-seed2" / "metrics.json").read_text())
    assert point["dev"]["accuracy"] == sum(right) / 8
    main([*command[:-5], "--shots", "0"])
    summary = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert [row["shots"] for row in summary["grid"]] == [0, 1]
    assert summary["method"] == ["0 shots", "1 shot"][summary["chosen"]["shots"]]
    with pytest.raises(ConfigError, match="made differently"):
        main([*command, "--calibrate"])
    with pytest.raises(ConfigError, match="--data: give the folder with the files of sst2"):
        main(["--task", "sst2", *command[4:]])
    (tmp_path / "data" / "mine.yaml").write_text((tmp_path / "mine.yaml").read_text())
    main(["--task", str(tmp_path / "data" / "mine.yaml"), *command[4:]])  # files next to it, as finetune
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("name", shipped(PROMPT_DIR))
def test_shipped_prompts_fit_their_tasks(name: str) -> None:
    _, task = load_task(name)
    prompt = load_prompt(name)
    labels = list(task.labels.values()) if isinstance(task.labels, dict) else task.labels or []
    for causal in (False, True):
        assert list(prompt.problems(task, labels, causal)) == []
        before, after = prompt.gapped(EXAMPLE, causal)
        assert "a {pair} film" in before and not (causal and after)


def test_solved_examples_come_before_the_gap() -> None:
    prompt = PromptDescription(pattern="{text}; {mask}?", causal_pattern="Q {text} A {mask}", separator="\n")
    examples = [Example("f:1", "one"), Example("f:2", "two")]
    assert prompt.demonstrations(examples, ["yes", "no"], causal=True) == "Q one A yes\nQ two A no\n"
    assert prompt.demonstrations(examples, ["yes", "no"], causal=False) == "one; yes?\ntwo; no?\n"
    assert [one.text for one in content_free(EXAMPLE)] == [one.pair for one in content_free(EXAMPLE)]
    assert content_free(EXAMPLE)[0].choices == ("x", "y")
    train = [Example(f"f:{at}", str(at)) for at in range(9)]
    assert draw_examples(train, 3, 1) == draw_examples(train, 3, 1) != draw_examples(train, 3, 2)
    with pytest.raises(ConfigError, match="the training file has 9 examples"):
        draw_examples(train, 10, 1)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"pattern": "{text}"}, "must have one {mask}"),
        ({"pattern": "It was {mask}"}, "must have {text}"),
        ({"words": {"negative": "good", "positive": "good"}}, "is the word of negative too"),
        ({"pattern": "{text} {mask} {mask}"}, "must have one {mask}"),
        ({"pattern": "{text} {mask}."}, "must end with {mask}"),
        ({"pattern": "{txt} {mask}"}, "unknown {txt}; did you mean text"),
        ({"pattern": "{pair} {mask}"}, "unknown {pair}"),
        ({"words": {"positive": "good"}}, "each label of the task needs a word"),
        ({"words": {"negative": "bad", "positive": "good", "positiv": "x"}}, "unknown label"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(settings: dict[str, Any], problem: str) -> None:
    _, task = load_task("sst2")
    plain = {"pattern": "{text} {mask}", "words": {"negative": "bad", "positive": "good"}}
    prompt = PromptDescription(**plain | settings)
    problems = list(prompt.problems(task, ["negative", "positive"], causal=True))
    assert any(problem in f"{one}" for one in problems), problems
    _, tagging = load_task("conll2003-ner")
    assert any("kind" in f"{one}" for one in prompt.problems(tagging, [], causal=False))


def test_files_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stsb: no shipped prompt; shipped are cola"):
        load_prompt("stsb")
    path = tmp_path / "mine.yaml"
    for text, problem in (("- a", "section of settings"), ("patern: x", "patern"), ("pattern: 3", "pattern")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            load_prompt(str(path))
