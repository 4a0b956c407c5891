"""Judge an exported model on a task without training: cloze prompts, few-shot examples, contextual calibration.

Masked models fill the gap of a pattern, causal models continue it, text-to-text models write what is in the gap. The
task is a description of docs/downstream.md. Prompts are YAML files, shipped (`prompts/`) or a user's own, that turn
examples into texts with a gap; pattern and words of labels are PET's pattern and verbalizer (Schick and Schütze 2021,
section 3).
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.task import TaskDescription, Text, load_description, load_task
from ctxlm_ds.atomic import output_folder, write_text
from ctxlm_ds.console import aligned, at_least, counted, setup_logging
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.process.library_noise import quiet_libraries
from ctxlm_ds.recipe.problems import Problem, did_you_mean, raise_problems
from ctxlm_ds.recipe.sections import Section

logger = logging.getLogger("ctxlm_ds")
PROMPT_DIR = Path(__file__).resolve().parent / "prompts"
GAP = "{mask}"
PLACES = re.compile(r"\{(\w*)\}")
CONTENT_FREE = ("N/A", "[MASK]", "")
"""Content-free inputs (Zhao et al. 2021, section 5)."""


class Gapped(NamedTuple):
    """A text with a gap."""

    before: str
    after: str


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
        for place in PLACES.findall(pattern):
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
        """Return the pattern of a kind of model."""
        return self.causal_pattern if causal and self.causal_pattern is not None else self.pattern

    def gapped(self, example: Example, causal: bool) -> Gapped:
        """Return the example as a text with a gap."""
        parts = {"text": example.text, "pair": example.pair or ""}
        before, after = self.pattern_for(causal).split(GAP)
        return Gapped(*(PLACES.sub(lambda place: parts[place[1]], part) for part in (before, after)))

    def demonstrations(self, examples: Sequence[Example], fillings: Sequence[str], causal: bool) -> str:
        """Return solved examples, each with the separator behind it.

        Args:
            examples: of the training file.
            fillings: what belongs into the gap of each.
            causal: which pattern.
        """
        texts = (self.gapped(example, causal) for example in examples)
        solved = (f"{text.before}{word}{text.after}{self.separator}"
                  for text, word in zip(texts, fillings, strict=True))  # fmt: skip
        return "".join(solved)


def content_free(example: Example) -> list[Example]:
    """Return the example with content-free inputs; its choices stay."""
    return [replace(example, text=text, pair=None if example.pair is None else text) for text in CONTENT_FREE]


def draw_examples(train: Sequence[Example], count: int, seed: int) -> list[Example]:
    """Return `count` different training examples, the same for each evaluated one (Zhao et al. 2021).

    Raises:
        ConfigError: the file has fewer.
    """
    if count > len(train):
        raise ConfigError(f"--shots {count}: the training file has {len(train)} examples")
    return random.Random(seed).sample(list(train), count)


def shipped_prompts() -> list[str]:
    """Return the names of the tasks with a shipped prompt."""
    return sorted(path.stem for path in PROMPT_DIR.glob("*.yaml"))


def load_prompt(name_or_path: str) -> PromptDescription:
    """Return the shipped prompt of a task, or a YAML file.

    Raises:
        ConfigError: there is none, or it is wrong; lists every problem.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = PROMPT_DIR / f"{name_or_path}.yaml"
        if not path.is_file():
            known = ", ".join(shipped_prompts())
            raise ConfigError(f"no prompt is shipped for {name_or_path}; shipped are {known}; give --prompt FILE.yaml")
    return load_description(PromptDescription, path, "prompt", "pattern, words")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--task", required=True, help="name of a shipped task, or a YAML description")
    add("--prompt", metavar="YAML", help="pattern and words; default: those shipped for the task")
    add("--model", required=True, type=Path, metavar="DIR", help="model in Hugging Face's form")
    add("--data", required=True, type=Path, metavar="DIR", help="folder of the task's files")
    add("--output", required=True, type=Path, metavar="DIR", help="folder of the results")
    add("--shots", type=at_least(0), default=0, metavar="K", help="solved examples in the prompt (default: 0)")
    add("--seeds", type=at_least(0), nargs="+", default=[1], metavar="N", help="draws of these examples")
    add("--score", choices=["sum", "mean"], default="sum", help="log-probability of a word or choice over its tokens")
    add("--calibrate", action="store_true", help="divide by the probabilities for content-free inputs")
    add("--max-length", type=at_least(8), metavar="N", help="longest prompt in tokens; default: the model's")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    arguments = parse_arguments(argv)
    setup_logging()
    quiet_libraries()
    name, task = load_task(arguments.task)
    prompt = load_prompt(arguments.prompt or name)
    seeds = arguments.seeds if arguments.shots else [0]
    wanted = {
        "task": task.model_dump(mode="json"), "prompt": prompt.model_dump(mode="json"),
        "model": str(arguments.model.resolve()), "data": str(arguments.data.resolve()), "score": arguments.score,
        "calibrate": arguments.calibrate, "max_length": arguments.max_length,
    }  # fmt: skip
    run_seeds(arguments, task, prompt, seeds, wanted)
    from ctxlm_ds.apps.downstream.results import read_results, result_rows, summarize

    results = read_results(arguments.output, wanted)
    found = summarize(results, task.judged_by[0], ("shots",))
    method = f"{counted(found['chosen']['shots'], 'shot')}{', calibrated' if arguments.calibrate else ''}"
    summary = {"task": name, "model": str(arguments.model), "method": method, "published": task.published, **found}
    write_text(arguments.output / "metrics.json", json.dumps(summary, indent=1) + "\n")
    print("\n".join(aligned(result_rows(summary, {"shots": "shots"}))))


def run_seeds(
    arguments: argparse.Namespace,
    task: TaskDescription,
    prompt: PromptDescription,
    seeds: Sequence[int],
    wanted: dict[str, Any],
) -> None:
    """Answer the prompts of each seed that has no result yet."""
    from ctxlm_ds.apps.downstream.fit import write_predictions
    from ctxlm_ds.apps.downstream.prepare import kind_class, load_tokenizer, longest_input, read_parts
    from ctxlm_ds.apps.downstream.prompting import Prompting, load_scorer
    from ctxlm_ds.apps.downstream.results import is_done

    folders = {seed: arguments.output / "points" / f"shots{arguments.shots}-seed{seed}" for seed in seeds}
    missing = {seed: folder for seed, folder in folders.items() if not is_done(folder, wanted)}
    if not missing:
        return
    parts = read_parts(task, arguments.data)
    tokenizer = load_tokenizer(arguments.model, False)
    scorer = load_scorer(arguments.model, tokenizer, scores_unknown=task.entry.answer == "choice")
    raise_problems(f"prompt of {arguments.task}", list(prompt.problems(task, parts.labels, scorer.causal)))
    unlimited = task.model_copy(update={"max_length": arguments.max_length or 2**20})
    kind = kind_class(task)(task, tokenizer, parts.labels, longest_input(unlimited, arguments.model, tokenizer))
    for examples in (parts.train, parts.dev):
        kind.check(examples)
    prompting = Prompting(kind, prompt, scorer, arguments.score == "mean", arguments.calibrate)
    for seed, folder in missing.items():
        predictions = prompting.predict(parts.dev, draw_examples(parts.train, arguments.shots, seed))
        scores = kind.score(predictions, parts.dev)
        logger.info("seed %d: %s", seed, ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))
        result = {"task": task.title, "model": str(arguments.model),
                  "point": {"shots": arguments.shots, "seed": seed}, "dev": scores}  # fmt: skip
        with output_folder(folder) as partial:
            write_predictions(partial / "dev_predictions.jsonl", kind, predictions, parts.dev)
            write_text(partial / "settings.json", json.dumps(wanted, indent=1) + "\n")
            write_text(partial / "metrics.json", json.dumps(result, indent=1) + "\n")
