"""Judge an exported model on a task without training: cloze prompts, few-shot examples, contextual calibration.

Masked models fill the gap of a pattern, causal models continue it, text-to-text models write what is in the gap. The
task is a description of docs/downstream.md; the words of its labels are in a prompt file (YAML).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.downstream import results
from ctxlm_ds.apps.downstream.prompt_task import PromptDescription, draw_examples, load_prompt
from ctxlm_ds.apps.downstream.task import TaskDescription, data_folder, load_task
from ctxlm_ds.atomic import output_folder, write_text
from ctxlm_ds.console import aligned, at_least, counted, logger, setup_logging
from ctxlm_ds.process.library_noise import quiet_libraries
from ctxlm_ds.recipe.problems import raise_problems


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
    wanted = {
        "task": task.recorded(), "prompt": prompt.model_dump(mode="json"),
        "model": str(arguments.model.resolve()), "data": str(arguments.data.resolve()), "score": arguments.score,
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
    from ctxlm_ds.apps.downstream.prepare import check_examples, kind_class, load_tokenizer, longest_input, read_parts
    from ctxlm_ds.apps.downstream.prompting import Prompting, load_scorer

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
