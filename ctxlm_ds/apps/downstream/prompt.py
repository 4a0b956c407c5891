"""Judge an exported model on a task without training: cloze prompts, few-shot examples, contextual calibration.

Masked models fill the gap of a pattern, causal models continue it, text-to-text models write what is in the gap. The
task is a description of docs/downstream.md. The pattern and the words of its labels (PET's pattern and verbalizer;
Schick and Schütze 2021, section 3) are in a prompt file: YAML, shipped (`prompts/`) or a user's own. Imports no torch.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.downstream import results
from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.task import FIELD, TaskDescription, Text, data_folder, load_description, load_task
from ctxlm_ds.atomic import output_folder, read_object, write_text
from ctxlm_ds.console import aligned, at_least, counted, logger, setup_logging
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.process.launch import quiet_libraries
from ctxlm_ds.recipe.problems import Problem, did_you_mean, raise_problems
from ctxlm_ds.recipe.sections import Section

PROMPT_DIR = Path(__file__).resolve().parent / "prompts"
GAP = "{mask}"


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
        solved = zip((self.gapped(example, causal) for example in examples), fillings, strict=True)
        return "".join(f"{before}{word}{after}{self.separator}" for (before, after), word in solved)


def draw_examples(train: Sequence[Example], count: int, seed: int) -> list[Example]:
    """Return the training examples before each evaluated one (Zhao et al. 2021); ConfigError for too few."""
    if count > len(train):
        raise ConfigError(f"--shots {count}: the training file has {len(train)} examples")
    return random.Random(seed).sample(list(train), count)


def load_prompt(name_or_path: str) -> PromptDescription:
    """Return the shipped prompt of a task, or a YAML file; ConfigError lists every problem."""
    return load_description(PromptDescription, name_or_path, PROMPT_DIR, "prompt", "pattern, words")[1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--task", required=True, help="name of a shipped task, or a YAML description")
    add("--prompt", metavar="YAML", help="pattern and words; default: those shipped for the task")
    add("--model", required=True, type=Path, metavar="DIR", help="model in Hugging Face's form")
    add("--data", type=Path, metavar="DIR", help="folder of the task's files; default: of a YAML's own")
    add("--output", required=True, type=Path, metavar="DIR", help="folder of the results")
    add("--shots", type=at_least(0), default=0, metavar="K", help="solved examples in the prompt (default: 0)")
    add("--seeds", type=at_least(0), nargs="+", default=[1], metavar="N", help="draws of these examples")
    add("--score", choices=["sum", "mean"], default="sum", help="log-probability of a word or choice over its tokens")
    add("--calibrate", action="store_true", help="divide by the probabilities for content-free inputs")
    add("--max-length", type=at_least(8), metavar="N", help="longest prompt in tokens; default: the model's")
    add("--split-special-tokens", action="store_true", default=None, help="names such as </s> in texts stay text")
    arguments = parser.parse_args(argv)
    setup_logging()
    quiet_libraries()
    name, task = load_task(arguments.task)
    arguments.data = data_folder(arguments.task, arguments.data)
    if arguments.split_special_tokens is not None:
        task = task.model_copy(update={"split_special_tokens": arguments.split_special_tokens})
    prompt = load_prompt(arguments.prompt or name)
    from ctxlm_ds.export.hf_config import EXPORT_RECORD  # numpy, which --help does without
    wanted = {
        "task": task.recorded(), "prompt": prompt.model_dump(mode="json"),
        "model": str(arguments.model.resolve()), "data": str(arguments.data.resolve()), "score": arguments.score,
        "export": read_object(arguments.model / EXPORT_RECORD),
        "calibrate": arguments.calibrate, "max_length": arguments.max_length,
    }  # fmt: skip
    seeds = arguments.seeds if arguments.shots else [0]
    folders = {seed: arguments.output / "points" / f"shots{arguments.shots}-seed{seed}" for seed in seeds}
    missing = {seed: folder for seed, folder in folders.items() if not results.is_done(folder, wanted)}
    if missing:
        answer(arguments, task, prompt, missing, wanted)
    found = results.summarize(results.read_results(arguments.output, wanted), task.judged_by[0], ("shots",))
    method = f"{counted(found['chosen']['shots'], 'shot')}{', calibrated' if arguments.calibrate else ''}"
    summary = {"task": name, "model": str(arguments.model), "method": method, "published": task.published, **found}
    write_text(arguments.output / results.RESULT_NAME, json.dumps(summary, indent=1) + "\n")
    print("\n".join(aligned(results.result_rows(summary, {"shots": "shots"}))))


def answer(
    arguments: argparse.Namespace, task: TaskDescription, prompt: PromptDescription, folders: dict[int, Path],
    wanted: dict[str, Any],
) -> None:  # fmt: skip
    from ctxlm_ds.apps.downstream.language_model import Prompting, load_scorer
    from ctxlm_ds.apps.downstream.prepare import check_examples, kind_class, load_tokenizer, longest_input, read_parts

    parts = read_parts(task, arguments.data)
    tokenizer = load_tokenizer(arguments.model, False, task.split_special_tokens)
    scorer = load_scorer(arguments.model, tokenizer, scores_unknown=task.entry.answer == "choice")
    raise_problems(f"prompt of {arguments.task}", list(prompt.problems(task, parts.labels, scorer.causal)))
    longest = longest_input(arguments.model, tokenizer, arguments.max_length or 2**20)
    kind = kind_class(task)(task, tokenizer, parts.labels, longest)
    for examples in (parts.train, parts.dev):
        check_examples(kind, examples)
    prompting = Prompting(kind, prompt, scorer, arguments.score == "mean", arguments.calibrate)
    for seed, folder in folders.items():
        predictions = prompting.predict(parts.dev, draw_examples(parts.train, arguments.shots, seed))
        scores = kind.score(predictions, parts.dev)
        logger.info("seed %d: %s", seed, ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))
        result = {"task": task.title, "model": str(arguments.model),
                  "point": {"shots": arguments.shots, "seed": seed}, "dev": scores,
                  "most_frequent": kind.most_frequent(parts.train, parts.dev)}  # fmt: skip
        with output_folder(folder) as partial:
            results.write_point(partial, wanted, result, {"dev": results.prediction_rows(kind, predictions, parts.dev)})
