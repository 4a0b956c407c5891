"""Prompts: YAML files, shipped (`prompts/`) or a user's own, that turn examples into texts with a gap.

The pattern and the words of labels are PET's pattern and verbalizer (Schick and Schütze 2021, section 3). Imports no
torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.task import FIELD, TaskDescription, Text, load_description
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.problems import Problem, did_you_mean
from ctxlm_ds.recipe.sections import Section

PROMPT_DIR = Path(__file__).resolve().parent / "prompts"
GAP = "{mask}"
CONTENT_FREE = ("N/A", "[MASK]", "")
"""Content-free inputs (Zhao et al. 2021, section 5)."""


class PromptDescription(Section):
    """How an example becomes a text with a gap, and what fills it."""

    pattern: str
    """Text with {text}, {pair} (second segment) and {mask}, the gap, which labels' words or choices fill."""
    causal_pattern: str | None = None
    """The pattern for causal models, which ends with {mask}; null takes `pattern`."""
    words: dict[str, Text] = {}
    """Label -> word or words in the gap; empty for multiple choice, whose choices fill it."""
    separator: str = "\n\n"
    """Between the examples of a few-shot prompt."""

    def problems(self, task: TaskDescription, labels: Sequence[str], causal: bool) -> Iterator[Problem]:
        """Yield what does not fit together, or not the task."""
        if task.entry.answer not in ("label", "choice"):
            yield Problem("kind", f"{task.kind}: prompts answer tasks of kind classification and multiple_choice")
        name = "causal_pattern" if causal and self.causal_pattern is not None else "pattern"
        pattern = self.pattern_for(causal)
        if pattern.count(GAP) != 1:
            yield Problem(name, f"{pattern!r} must have one {GAP}")
        if "{text}" not in pattern:
            yield Problem(name, f"{pattern!r} must have {{text}}: without it the example is not read")
        if causal and not pattern.endswith(GAP):
            yield Problem(name, f"{pattern!r} must end with {GAP}: a causal model reads only what is before it")
        known = ["text", "mask", *(["pair"] if "pair" in task.columns else [])]
        for place in FIELD.findall(pattern):
            if place not in known:
                yield Problem(name, f"unknown {{{place}}}{did_you_mean(place, known)}")
        for label in [] if task.entry.answer == "choice" else labels:
            if not self.words.get(label, "").strip():
                yield Problem(f"words.{label}", "missing; each label of the task needs a word")
        label_of: dict[str, str] = {}
        for label, word in self.words.items():
            if label not in labels:
                yield Problem(f"words.{label}", f"unknown label{did_you_mean(label, labels)}")
            elif (first := label_of.setdefault(word.strip(), label)) != label:
                yield Problem(f"words.{label}", f"{word!r} is the word of {first} too; each label needs its own")

    def pattern_for(self, causal: bool) -> str:
        return self.causal_pattern if causal and self.causal_pattern is not None else self.pattern

    def gapped(self, example: Example, causal: bool) -> tuple[str, str]:
        """Return the example as a text with a gap: what is before and after it."""
        parts = {"text": example.text, "pair": example.pair or ""}
        before, after = self.pattern_for(causal).split(GAP)
        return FIELD.sub(lambda place: parts[place[1]], before), FIELD.sub(lambda place: parts[place[1]], after)

    def demonstrations(self, examples: Sequence[Example], fillings: Sequence[str], causal: bool) -> str:
        """Return training examples with their gaps filled, each with the separator behind it."""
        texts = (self.gapped(example, causal) for example in examples)
        solved = zip(texts, fillings, strict=True)
        return "".join(f"{before}{word}{after}{self.separator}" for (before, after), word in solved)


def content_free(example: Example) -> list[Example]:
    """Return the example with content-free inputs; its choices stay."""
    return [replace(example, text=text, pair=None if example.pair is None else text) for text in CONTENT_FREE]


def draw_examples(train: Sequence[Example], count: int, seed: int) -> list[Example]:
    """Return the training examples before each evaluated one (Zhao et al. 2021); ConfigError for too few."""
    if count > len(train):
        raise ConfigError(f"--shots {count}: the training file has {len(train)} examples")
    return random.Random(seed).sample(list(train), count)


def load_prompt(name_or_path: str) -> PromptDescription:
    """Return the shipped prompt of a task, or a YAML file; ConfigError lists every problem."""
    return load_description(PromptDescription, name_or_path, PROMPT_DIR, "prompt", "pattern, words")[1]
