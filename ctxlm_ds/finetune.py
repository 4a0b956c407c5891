"""Fine-tune an exported model on a task: `python -m ctxlm_ds.finetune --task T --model DIR --data DIR --output DIR`.

With `--features` in place of `--model`, a small model reads the frozen vectors of a model, or static ones.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.downstream import results
from ctxlm_ds.apps.downstream.examples import read_files
from ctxlm_ds.apps.downstream.features import options
from ctxlm_ds.apps.downstream.features.options import NOT_NEGATIVE, POSITIVE, SHARE
from ctxlm_ds.apps.downstream.kinds.entries import CRF_FORM, GPT1_FORM, TEXT_FORM
from ctxlm_ds.apps.downstream.metrics import check_packages
from ctxlm_ds.apps.downstream.results import FitSettings, Point, Tuning
from ctxlm_ds.apps.downstream.task import TaskDescription, data_folder, load_task
from ctxlm_ds.atomic import read_object, write_text
from ctxlm_ds.console import aligned, at_least, counted, logger, program, run_command, setup_logging
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.export.hf_config import EXPORT_RECORD
from ctxlm_ds.process.launch import clear_stale_build_locks, quiet_libraries
from ctxlm_ds.recipe.deepspeed import deepspeed_for_trainer

DEFAULT_GRID = {"batch_sizes": [32], "learning_rates": [5e-5], "epochs": [3.0]}
FEW_STEPS, MOST_EPOCHS = 200, 50
"""Fewer steps seldom teach a task, so small tasks have more epochs by default."""
SMALL_TASK = 2000
"""Training examples below which scores differ much between seeds."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=program("ctxlm_ds.finetune"), description="Fine-tune an exported model.")
    add = parser.add_argument
    add("--task", required=True, help="name of a shipped task, or a YAML description")
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--model", type=Path, metavar="DIR", help="model in Hugging Face's form, to be fine-tuned")
    start.add_argument("--features", type=Path, metavar="PATH", help="model folder (Hugging Face's form, or ELMo) or "
                       "file of static vectors (GloVe, word2vec), which stay as they are")  # fmt: skip
    add("--data", type=Path, metavar="DIR", help="folder of the task's files; default: of a YAML's own")
    add("--output", required=True, type=Path, metavar="DIR", help="folder of the results")
    add("--train-file", metavar="NAME", help="file of --data in place of the task's")
    add("--dev-file", metavar="NAME", help="file of --data in place of the task's")
    add("--max-train-examples", type=at_least(1), metavar="N", help="use the first N only")
    add("--max-length", type=at_least(8), metavar="N", help="longest input in tokens")
    add("--split-special-tokens", action="store_true", default=None, help="names such as </s> in texts stay text")
    _add_forms(parser)
    _add_grid(parser)
    _add_tuning(parser)
    options.add_features(parser)
    arguments = parser.parse_args(argv)
    options.check_options(parser, arguments)
    return arguments


def _add_forms(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("form of the task").add_argument
    add("--text-to-text", action="store_true", help="an encoder-decoder (T5, BART) reads a template, writes the answer")
    add("--gpt1-inputs", action="store_true", help="a causal model reads GPT-1's start, delimiter and extract tokens")
    add("--crf", action="store_true", help="tags are scored by a conditional random field")
    add("--beams", type=at_least(1), default=1, metavar="N", help="of the search; default: 1, greedy")
    add("--lm-weight", type=NOT_NEGATIVE, metavar="X", help="of the language model's loss (GPT-1); default: 0.5")


def _add_grid(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("grid (each combination is one run)").add_argument
    add("--seeds", type=at_least(0), nargs="+", default=[1], metavar="N")
    add("--batch-sizes", type=at_least(1), nargs="+", metavar="N", help="of all ranks; default: 32")
    add("--learning-rates", type=POSITIVE, nargs="+", metavar="X", help="default: 5e-5; features: 1e-3")
    add("--epochs", type=POSITIVE, nargs="+", metavar="X", help="default: 3, or more for 200 steps; features: 10")
    add("--published-grid", action="store_true", help="batch 16, 32; rate 2e-5, 3e-5, 5e-5; epochs 2, 3, 4")
    add("--point", type=at_least(0), metavar="N", help="run only point N, for example $SLURM_ARRAY_TASK_ID")


def _add_tuning(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    add("--train-layers", type=at_least(0), metavar="N", help="train the last N layers and the head")
    add("--gradual", action="store_true", help="unfreeze one more layer each epoch")
    add("--layer-decay", type=float, default=1.0, metavar="X", help="factor of the rate per layer down")
    add("--lora", type=at_least(1), default=0, metavar="RANK", help="train LoRA matrices (peft)")
    add("--random", action="store_true", help="start from random weights: what pretraining is worth")
    add("--weight-decay", type=SHARE, default=0.01, metavar="X")
    add("--warmup", type=SHARE, default=0.1, metavar="SHARE", help="of the steps, below 1")
    add("--early-stopping", type=at_least(1), default=0, metavar="N", help="epochs without a better score")
    add("--train-on", choices=["first", "all"], default="first", help="subwords of a word with a label")
    add("--read-from", choices=["first", "sum"], default="first", help="distribution of a word")
    add("--deepspeed", type=Path, metavar="JSON", help="DeepSpeed's configuration, or the name of one in ds_configs/")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    add("--bf16", action="store_true")
    add("--save-model", action="store_true", help="keep the fine-tuned model of each run")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    setup_logging(int(os.environ.get("RANK", "0")))
    quiet_libraries()
    if arguments.deepspeed is not None:
        deepspeed_for_trainer(arguments.deepspeed)
        if "MASTER_ADDR" not in os.environ:
            raise ConfigError("--deepspeed: needs a launcher, also for one process: torchrun --standalone "
                              "--nproc-per-node=N -m ctxlm_ds.finetune …, or deepspeed --module …")  # fmt: skip
        # It may build operators; before torch is imported.
        clear_stale_build_locks()
    name, task = load_task(arguments.task)
    arguments.data = data_folder(arguments.task, arguments.data)
    given = {"train": arguments.train_file, "dev": arguments.dev_file, "max_length": arguments.max_length,
             "split_special_tokens": arguments.split_special_tokens}  # fmt: skip
    task = task.model_copy(update={name: value for name, value in given.items() if value is not None})
    check_packages()
    form = choose_form(task, arguments)
    settings = FitSettings(
        Tuning(arguments.train_layers, arguments.gradual, arguments.layer_decay, arguments.lora),
        arguments.random, arguments.weight_decay, arguments.warmup, arguments.early_stopping,
        None if arguments.deepspeed is None else str(arguments.deepspeed), arguments.bf16, arguments.save_model,
    )  # fmt: skip
    source: Path = arguments.model or arguments.features
    wanted = {
        "task": task.recorded(),
        "model": str(source.resolve()),
        "export": read_object(source / EXPORT_RECORD),
        "data": str(arguments.data.resolve()),
        "settings": asdict(settings),
        "max_train_examples": arguments.max_train_examples,
        "words": [arguments.train_on, arguments.read_from],
        **options.recorded_options(arguments),
    }
    if form[0] is not None:
        wanted["form"] = list(form)
    folders = {point: Path(arguments.output) / "points" / point.name for point in _points(arguments, task)}
    missing = {point: folder for point, folder in folders.items() if not results.is_done(folder, wanted)}
    if len(missing) < len(folders):
        logger.info("%s of %d have a result already", counted(len(folders) - len(missing), "point"), len(folders))
    if missing:
        _run_points(arguments, task, form, settings, missing, wanted)
    if int(os.environ.get("RANK", "0")) != 0:
        return
    points = results.read_results(arguments.output, wanted)
    summary = {"task": name, "model": str(source), "published": task.published}
    summary |= {"random": arguments.random, "max_train_examples": arguments.max_train_examples}
    if arguments.features is not None:
        summary["method"] = f"frozen vectors, layers {arguments.layers}"
    summary |= results.summarize(points, task.judged_by[0])
    write_text(arguments.output / results.RESULT_NAME, json.dumps(summary, indent=1) + "\n")
    results.write_report(arguments.output, task, summary, points)
    sys.stdout.write("\n".join(aligned(results.result_rows(summary))) + "\n")
    models = "points/*/model" if arguments.save_model else "no model was kept (--save-model keeps it)"
    logger.info("%s: report.html, metrics.json, points/*/dev_predictions.jsonl; %s", arguments.output, models)


def _points(arguments: argparse.Namespace, task: TaskDescription) -> list[Point]:
    given = {name: getattr(arguments, name) for name in DEFAULT_GRID if getattr(arguments, name)}
    if given and arguments.published_grid:
        raise ConfigError(f"--published-grid and --{next(iter(given)).replace('_', '-')} exclude each other")
    default: dict[str, Any] = DEFAULT_GRID if arguments.features is None else options.GRID
    if default is DEFAULT_GRID and not arguments.published_grid and not arguments.epochs:
        examples = len(read_files(task, arguments.data).train[: arguments.max_train_examples])
        steps = math.ceil(examples / max((default | given)["batch_sizes"]))
        default = default | {"epochs": [float(max(3, min(MOST_EPOCHS, math.ceil(FEW_STEPS / steps))))]}
    grid: dict[str, Any] = results.PUBLISHED if arguments.published_grid else default | given
    points = results.grid_points(grid["batch_sizes"], grid["learning_rates"], grid["epochs"], arguments.seeds)
    if arguments.point is None:
        return points
    if arguments.point >= len(points):
        raise ConfigError(f"--point {arguments.point}: the grid has the points 0 to {len(points) - 1}")
    return [points[arguments.point]]


def choose_form(task: TaskDescription, arguments: argparse.Namespace) -> tuple[str | None, dict[str, Any]]:
    """Return the form in which a task is run, if it is not the plain one of its kind, and the options of its class."""
    chosen = [name for name in (TEXT_FORM, GPT1_FORM, CRF_FORM) if getattr(arguments, name)]
    if len(chosen) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in chosen[:2])
        raise ConfigError(f"{first} and {second} exclude each other; give one")
    form = chosen[0] if chosen else task.entry.always
    if arguments.beams > 1 and form != TEXT_FORM:
        raise ConfigError("--beams: only with --text-to-text, or for tasks of kind text_to_text")
    of_words = {"train_on": arguments.train_on, "read_from": arguments.read_from}
    for option, given in of_words.items():
        if given != "first" and task.entry.answer != "tags":
            raise ConfigError(f"--{option.replace('_', '-')} {given}: only for tasks of kind tagging; this one is of "
                              f"kind {task.kind}")  # fmt: skip
    if arguments.lm_weight is not None and form != GPT1_FORM:
        raise ConfigError("--lm-weight: only with --gpt1-inputs")
    if form == TEXT_FORM:
        return form, {"beams": arguments.beams}
    if form == GPT1_FORM:
        return form, {} if arguments.lm_weight is None else {"lm_weight": arguments.lm_weight}
    return form, of_words if task.entry.answer == "tags" else {}


def _run_points(
    arguments: argparse.Namespace, task: TaskDescription, form: tuple[str | None, dict[str, Any]],
    settings: FitSettings, folders: Mapping[Point, Path], wanted: dict[str, Any],
) -> None:  # fmt: skip
    """Run points of the grid; all files are checked before the first."""
    source: Path = arguments.model or arguments.features
    if not source.exists():
        option = "--model" if arguments.features is None else "--features"
        raise ConfigError(f"{option} {source}: no such file or folder (names on the Hub are not looked up)")
    from ctxlm_ds.apps.downstream.fit import rows_of_a_device, run_point
    from ctxlm_ds.apps.downstream.prepare import make_kind, make_sets, read_parts

    for point in folders:
        rows_of_a_device(point)
    parts = read_parts(task, arguments.data, arguments.max_train_examples)
    if arguments.features is not None:
        from ctxlm_ds.apps.downstream.features.kinds import kind_of_features

        kind = kind_of_features(arguments, task, parts)
    else:
        kind = make_kind(task, arguments.model, parts, form[0], **form[1])
    sets = make_sets(kind, parts)
    longest = "frozen vectors" if arguments.model is None else f"inputs of up to {kind.max_length} tokens"
    logger.info("%s for training, %s for development, %s",
                counted(len(parts.train), "example"), counted(len(parts.dev), "example"), longest)  # fmt: skip
    steps = min(math.ceil(len(parts.train) / point.batch_size) * point.epochs for point in folders)
    if steps < FEW_STEPS:
        logger.warning("%d steps: below some %d few tasks are learned; give more --epochs", steps, FEW_STEPS)
    if len(arguments.seeds) == 1 and len(parts.train) < SMALL_TASK:
        logger.warning("one seed: scores of so few examples differ between seeds; give --seeds 1 2 3 4 5")
    for number, (point, folder) in enumerate(folders.items(), 1):
        logger.info("run %d of %d: %s", number, len(folders), point.name)
        result = run_point(source, kind, sets, point, settings, folder, wanted)
        logger.info("%s: %s", point.name, ", ".join(f"{name} {value:.4f}" for name, value in result["dev"].items()))


if __name__ == "__main__":
    run_command(main)
