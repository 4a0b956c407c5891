"""Descriptions of prompts: what is shipped fits its task, and each mistake is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.prompt_task import PROMPT_DIR, PromptDescription, content_free, draw_examples, load_prompt
from ctxlm_ds.apps.downstream.task import load_task, shipped
from ctxlm_ds.errors import ConfigError

EXAMPLE = Example("f:1", "a {pair} film", "it moves", choices=("x", "y"))


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
