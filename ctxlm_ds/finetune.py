"""Fine-tune an exported model on a task: `python -m ctxlm_ds.finetune --task T --model DIR --data DIR --output DIR`.

With `--features` in place of `--model`, a small model reads the frozen vectors of a model, or static ones.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.apps.downstream.examples import Files, read_files
from ctxlm_ds.apps.downstream.features.options import GRID, add_features, check_options, recorded_options
from ctxlm_ds.apps.downstream.kinds.entries import CRF_FORM, GPT1_FORM, TEXT_FORM
from ctxlm_ds.apps.downstream.results import (
    PUBLISHED,
    RESULT_NAME,
    Point,
    grid_points,
    is_done,
    read_results,
    result_rows,
    summarize,
    write_report,
)
from ctxlm_ds.apps.downstream.task import TaskDescription, is_file_name, load_task
from ctxlm_ds.atomic import write_text
from ctxlm_ds.console import aligned, at_least, counted, program, run_command, setup_logging
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.installed import check_extra
from ctxlm_ds.process.build_locks import clear_stale_build_locks, use_own_build_folder
from ctxlm_ds.process.library_noise import quiet_libraries
from ctxlm_ds.recipe.json_source import deepspeed_for_trainer

if TYPE_CHECKING:
    from ctxlm_ds.apps.downstream.fit import FitSettings

logger = logging.getLogger("ctxlm_ds")
PACKAGES = ("sklearn", "scipy")
DEFAULT_GRID = {"batch_sizes": [32], "learning_rates": [5e-5], "epochs": [3.0]}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog=program("ctxlm_ds.finetune"), description="Fine-tune an exported model.")
    parser.add_argument("--task", required=True, help="name of a shipped task, or a YAML description")
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--model", type=Path, metavar="DIR", help="model in Hugging Face's form, to be fine-tuned")
    start.add_argument("--features", type=Path, metavar="PATH", help="model folder (Hugging Face's form, or ELMo) or "
                       "file of static vectors (GloVe, word2vec), which stay as they are")  # fmt: skip
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the task's files; default: of a YAML's own")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder of the results")
    parser.add_argument("--train-file", metavar="NAME", help="file of --data in place of the task's")
    parser.add_argument("--dev-file", metavar="NAME", help="file of --data in place of the task's")
    parser.add_argument("--max-train-examples", type=at_least(1), metavar="N", help="use the first N only")
    parser.add_argument("--max-length", type=at_least(8), metavar="N", help="longest input in tokens")
    _add_forms(parser)
    _add_grid(parser)
    _add_tuning(parser)
    add_features(parser, share, at_least_zero)
    return parser.parse_args(argv)


def _add_forms(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("form of the task")
    group.add_argument(
        "--text-to-text", action="store_true", help="an encoder-decoder (T5, BART) reads a template, writes the answer"
    )
    group.add_argument(
        "--gpt1-inputs", action="store_true", help="a causal model reads GPT-1's start, delimiter and extract tokens"
    )
    group.add_argument("--crf", action="store_true", help="tags are scored by a conditional random field")
    group.add_argument("--beams", type=at_least(1), default=1, metavar="N", help="of the search; default: 1, greedy")
    group.add_argument(
        "--lm-weight", type=at_least_zero, metavar="X", help="of the language model's loss (GPT-1); default: 0.5"
    )


def _add_grid(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("grid (each combination is one run)")
    group.add_argument("--seeds", type=at_least(0), nargs="+", default=[1], metavar="N")
    group.add_argument("--batch-sizes", type=at_least(1), nargs="+", metavar="N", help="of all ranks; default: 32")
    group.add_argument("--learning-rates", type=positive, nargs="+", metavar="X", help="default: 5e-5; features: 1e-3")
    group.add_argument("--epochs", type=positive, nargs="+", metavar="X", help="default: 3; features: 10")
    group.add_argument(
        "--published-grid", action="store_true", help="batch 16, 32; rate 2e-5, 3e-5, 5e-5; epochs 2, 3, 4"
    )
    group.add_argument(
        "--point", type=at_least(0), metavar="N", help="run only point N, for example $SLURM_ARRAY_TASK_ID"
    )


def _add_tuning(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--train-layers", type=at_least(0), metavar="N", help="train the last N layers and the head")
    group.add_argument("--gradual", action="store_true", help="unfreeze one more layer each epoch")
    group.add_argument("--layer-decay", type=float, default=1.0, metavar="X", help="factor of the rate per layer down")
    group.add_argument("--lora", type=at_least(1), default=0, metavar="RANK", help="train LoRA matrices (peft)")
    group.add_argument("--random", action="store_true", help="start from random weights: what pretraining is worth")
    group.add_argument("--weight-decay", type=share, default=0.01, metavar="X")
    group.add_argument("--warmup", type=share, default=0.1, metavar="SHARE", help="of the steps, below 1")
    group.add_argument(
        "--early-stopping", type=at_least(1), default=0, metavar="N", help="epochs without a better score"
    )
    group.add_argument("--train-on", choices=["first", "all"], default="first", help="subwords of a word with a label")
    group.add_argument("--read-from", choices=["first", "sum"], default="first", help="distribution of a word")
    group.add_argument(
        "--deepspeed", type=Path, metavar="JSON", help="DeepSpeed's configuration, or the name of one in ds_configs/"
    )
    group.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    group.add_argument("--bf16", action="store_true")
    group.add_argument("--save-model", action="store_true", help="keep the fine-tuned model of each run")


def positive(text: str) -> float:
    """Read a number above 0 (an argparse type)."""
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def at_least_zero(text: str) -> float:
    """Read a number of at least 0 (an argparse type)."""
    return 0.0 if text.strip() == "0" else positive(text)


def share(text: str) -> float:
    """Read a number of at least 0 and below 1 (an argparse type)."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 up to 1")
    return value


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    arguments = parse_arguments(argv)
    setup_logging(int(os.environ.get("RANK", "0")))
    quiet_libraries()
    check_options(arguments)
    if arguments.deepspeed is not None:
        deepspeed_for_trainer(arguments.deepspeed)
        if "MASTER_ADDR" not in os.environ:
            raise ConfigError("--deepspeed: needs a launcher, also for one process: torchrun --standalone "
                              "--nproc-per-node=N -m ctxlm_ds.finetune …, or deepspeed --module …")  # fmt: skip
        # It may build operators; before torch is imported.
        use_own_build_folder()
        clear_stale_build_locks()
    source: Path = arguments.model or arguments.features
    name, task = load_task(arguments.task)
    if arguments.data is None:
        if not is_file_name(arguments.task):
            raise ConfigError(f"--data: give the folder with the files of {arguments.task}")
        arguments.data = Path(arguments.task).parent
    task = _changed(task, arguments)
    check_packages()
    points = _points(arguments)
    variant = _variant(task, arguments)
    files = _read_files(arguments, task, points)
    settings = _settings(arguments)
    wanted = {
        "task": task.model_dump(mode="json"),
        "model": str(source.resolve()),
        "data": str(arguments.data.resolve()),
        "settings": asdict(settings),
        "max_train_examples": arguments.max_train_examples,
        "words": [arguments.train_on, arguments.read_from],
        **recorded_options(arguments),
    }
    if variant is not None:
        wanted["form"] = [variant, _kind_options(task, arguments)]
    _run_points(arguments, task, points, settings, wanted, files)
    if int(os.environ.get("RANK", "0")) != 0:
        return
    results = read_results(arguments.output, wanted)
    summary = {"task": name, "model": str(source), "published": task.published}
    summary |= {"random": arguments.random, "max_train_examples": arguments.max_train_examples}
    if arguments.features is not None:
        summary["method"] = f"frozen vectors, layers {arguments.layers}"
    summary |= summarize(results, task.judged_by[0])
    write_text(arguments.output / "metrics.json", json.dumps(summary, indent=1) + "\n")
    write_report(arguments.output, task, summary, results)
    sys.stdout.write("\n".join(aligned(result_rows(summary))) + "\n")
    models = "points/*/model" if arguments.save_model else "no model was kept (--save-model keeps it)"
    logger.info("%s: report.html, metrics.json, points/*/dev_predictions.jsonl; %s", arguments.output, models)


def check_packages() -> None:
    """Refuse a missing package (ConfigError)."""
    check_extra("downstream", PACKAGES)


def _changed(task: TaskDescription, arguments: argparse.Namespace) -> TaskDescription:
    given = {"train": arguments.train_file, "dev": arguments.dev_file, "max_length": arguments.max_length}
    return task.model_copy(update={name: value for name, value in given.items() if value is not None})


def _read_files(arguments: argparse.Namespace, task: TaskDescription, points: Sequence[Point]) -> Files | None:
    """Check model folder and files before torch is imported; None if every point has a result."""
    if all((_folder(arguments, point) / RESULT_NAME).is_file() for point in points):
        return None
    source: Path = arguments.model or arguments.features
    if not source.exists():
        option = "--model" if arguments.features is None else "--features"
        raise ConfigError(f"{option} {source}: no such file or folder (names on the Hub are not looked up)")
    return read_files(task, arguments.data)


def _folder(arguments: argparse.Namespace, point: Point) -> Path:
    return Path(arguments.output) / "points" / point.name


def _points(arguments: argparse.Namespace) -> list[Point]:
    given = {name: getattr(arguments, name) for name in DEFAULT_GRID if getattr(arguments, name)}
    if given and arguments.published_grid:
        raise ConfigError(f"--published-grid and --{next(iter(given)).replace('_', '-')} exclude each other")
    default = DEFAULT_GRID if arguments.features is None else GRID
    grid: dict[str, Any] = PUBLISHED if arguments.published_grid else default | given
    points = grid_points(grid["batch_sizes"], grid["learning_rates"], grid["epochs"], arguments.seeds)
    if arguments.point is None:
        return points
    if arguments.point >= len(points):
        raise ConfigError(f"--point {arguments.point}: the grid has the points 0 to {len(points) - 1}")
    return [points[arguments.point]]


def _variant(task: TaskDescription, arguments: argparse.Namespace) -> str | None:
    """Return the form in which a task is run, if it is not the plain one of its kind."""
    chosen = [name for name in (TEXT_FORM, GPT1_FORM, CRF_FORM) if getattr(arguments, name)]
    if len(chosen) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in chosen[:2])
        raise ConfigError(f"{first} and {second} exclude each other; give one")
    variant = chosen[0] if chosen else task.entry.always
    if arguments.beams > 1 and variant != TEXT_FORM:
        raise ConfigError("--beams: only with --text-to-text, or for tasks of kind text_to_text")
    for option, given in (("--train-on", arguments.train_on), ("--read-from", arguments.read_from)):
        if given != "first" and task.entry.answer != "tags":
            raise ConfigError(f"{option} {given}: only for tasks of kind tagging; this one is of kind {task.kind}")
    if arguments.lm_weight is not None and variant != GPT1_FORM:
        raise ConfigError("--lm-weight: only with --gpt1-inputs")
    return variant


def _kind_options(task: TaskDescription, arguments: argparse.Namespace) -> dict[str, Any]:
    variant = _variant(task, arguments)
    if variant == TEXT_FORM:
        return {"beams": arguments.beams}
    if variant == GPT1_FORM:
        return {} if arguments.lm_weight is None else {"lm_weight": arguments.lm_weight}
    return {"train_on": arguments.train_on, "read_from": arguments.read_from} if task.entry.answer == "tags" else {}


def _settings(arguments: argparse.Namespace) -> FitSettings:
    from ctxlm_ds.apps.downstream.fit import FitSettings
    from ctxlm_ds.apps.downstream.tuning import Tuning

    tuning = Tuning(arguments.train_layers, arguments.gradual, arguments.layer_decay, arguments.lora)
    return FitSettings(
        tuning, arguments.random, arguments.weight_decay, arguments.warmup, arguments.early_stopping,
        None if arguments.deepspeed is None else str(arguments.deepspeed), arguments.bf16, arguments.save_model,
    )  # fmt: skip


def _run_points(
    arguments: argparse.Namespace,
    task: TaskDescription,
    points: list[Point],
    settings: FitSettings,
    wanted: dict[str, Any],
    files: Files | None,
) -> None:
    """Run the points that have no result yet; all files are checked before the first."""
    from ctxlm_ds.apps.downstream.fit import run_point
    from ctxlm_ds.apps.downstream.prepare import make_kind, make_parts, make_sets

    folders = {point: _folder(arguments, point) for point in points}
    missing = [point for point in points if not is_done(folders[point], wanted)]
    if len(missing) < len(points):
        logger.info("%s of %d have a result already", counted(len(points) - len(missing), "point"), len(points))
    if not missing or files is None:
        return
    parts = make_parts(task, files, arguments.max_train_examples)
    if arguments.features is not None:
        from ctxlm_ds.apps.downstream.features.kinds import kind_of_features

        kind = kind_of_features(arguments, task, parts)
    else:
        kind = make_kind(task, arguments.model, parts, _variant(task, arguments), **_kind_options(task, arguments))
    sets = make_sets(kind, parts)
    longest = "frozen vectors" if arguments.model is None else f"inputs of up to {kind.max_length} tokens"
    logger.info("%s for training, %s for development, %s",
                counted(len(parts.train), "example"), counted(len(parts.dev), "example"), longest)  # fmt: skip
    for number, point in enumerate(missing, 1):
        logger.info("run %d of %d: %s", number, len(missing), point.name)
        result = run_point(arguments.model or arguments.features, kind, sets, point, settings, folders[point], wanted)
        logger.info("%s: %s", point.name, ", ".join(f"{name} {value:.4f}" for name, value in result["dev"].items()))


if __name__ == "__main__":
    run_command(main)
