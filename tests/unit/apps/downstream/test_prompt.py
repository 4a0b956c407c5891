"""Prompts: what is shipped fits its task, mistakes are named, and the command keeps results of each seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.downstream.compare_scores import read_run
from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.prompt import (
    PromptDescription,
    content_free,
    draw_examples,
    load_prompt,
    main,
    shipped_prompts,
)
from ctxlm_ds.apps.downstream.task import load_task
from ctxlm_ds.errors import ConfigError
from tests.downstream_models import sentiment, write_bert, write_rows


def test_results_are_those_of_a_fine_tuning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bert(tmp_path / "model")
    task, examples = sentiment(12)
    write_rows(tmp_path / "data" / "train.tsv", examples)
    write_rows(tmp_path / "data" / "dev.tsv", examples[:8])
    description = task.model_dump(exclude_defaults=True)
    lines = [f"{name}: {json.dumps(value)}" for name, value in description.items()]
    (tmp_path / "mine.yaml").write_text("\n".join(lines))
    (tmp_path / "prompt.yaml").write_text("pattern: '{text} a {mask} film'\nwords: {bad: bad, good: good}\n")
    command = ["--task", str(tmp_path / "mine.yaml"), "--prompt", str(tmp_path / "prompt.yaml"),
               "--model", str(tmp_path / "model"), "--data", str(tmp_path / "data"),
               "--output", str(tmp_path / "out"), "--shots", "1", "--seeds", "1", "2"]  # fmt: skip
    capsys.readouterr()  # what making the model has said
    main(command)
    shown = capsys.readouterr().out
    main(command)
    assert capsys.readouterr().out == shown and "accuracy" in shown
    run = read_run(str(tmp_path / "out"))
    assert (run.model, run.task, run.num_seeds) == ("model, 1 shot", "mine", 2)
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


EXAMPLE = Example("f:1", "a {pair} film", "it moves", choices=("x", "y"))


@pytest.mark.parametrize("name", shipped_prompts())
def test_shipped_prompts_fit_their_tasks(name: str) -> None:
    _, task = load_task(name)
    prompt = load_prompt(name)
    labels = list(task.labels.values()) if isinstance(task.labels, dict) else task.labels or []
    for causal in (False, True):
        assert list(prompt.problems(task, labels, causal)) == []
        text = prompt.gapped(EXAMPLE, causal)
        assert "a {pair} film" in text.before and not (causal and text.after)


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
    with pytest.raises(ConfigError, match="no prompt is shipped for stsb"):
        load_prompt("stsb")
    path = tmp_path / "mine.yaml"
    for text, problem in (("- a", "section of settings"), ("patern: x", "patern"), ("pattern: 3", "pattern")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            load_prompt(str(path))
