"""Rows as the model reads them: a recipe's sample indexes built ahead of the job, and rows of a run's training."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctxlm_ds.console import at_least, setup_logging
from ctxlm_ds.process.run_files import read_value

ROWS_SHOWN = 8
CONFIG_NAME = "config.yaml"


def check_run(run_dir: Path) -> None:
    """Refuse a folder that is no run. Raises DataError."""
    from ctxlm_ds.apps.cluster.run_status import is_run
    from ctxlm_ds.errors import DataError

    if not run_dir.is_dir():
        raise DataError(f"{run_dir}: no such folder; give a run's directory, such as runs/NAME")
    if not is_run(run_dir) and not (run_dir / CONFIG_NAME).is_file():
        raise DataError(f"{run_dir} is no run: it has neither a {CONFIG_NAME} nor a history; give a run's directory")


def _has_rows(event: Mapping[str, Any]) -> bool:
    """Return whether an event of the history, a file, is about the rows of a step."""
    rows, why, step = event.get("rows"), event.get("why"), read_value(event, "step", int)
    is_whole = isinstance(rows, dict) and all(read_value(rows, name, int) is not None for name in ("first", "count"))
    return is_whole and isinstance(why, str) and step is not None


def list_batches(run_dir: Path, events: list[dict[str, Any]]) -> None:
    """Print a line for each bad batch."""
    for event in events:
        first, last = event["rows"]["first"], event["rows"]["first"] + event["rows"]["count"] - 1
        print(f"{event['event']} step {event['step']}, rows {first} to {last}: {event['why']}")
    if not events:
        print(f"no bad batch is on record in {run_dir}")


def find_stretch(args: argparse.Namespace, events: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the first place and the number of the requested rows."""
    from ctxlm_ds.errors import DataError

    if args.first_row is not None:
        return args.first_row, args.count or ROWS_SHOWN
    found = [event["rows"] for event in events if event["step"] == args.step]
    if not found:
        steps = ", ".join(dict.fromkeys(str(event["step"]) for event in events))
        others = f"recorded steps: {steps}" if steps else "no other step has one either"
        raise DataError(f"{args.run_dir}/history.jsonl: no bad batch of step {args.step}; {others}")
    first, count = found[-1]["first"], found[-1]["count"]
    return first, min(count, args.count or count)


def show(run_dir: Path, first: int, count: int) -> None:
    """Print the rows, from the run's recipe and tokenizer."""
    from rich.console import Console

    from ctxlm_ds.data.stream.preview import BatchRows, preview_planned
    from ctxlm_ds.data.stream.run_datasets import build_run_rows
    from ctxlm_ds.objectives.base import build_objective
    from ctxlm_ds.recipe.load import load_saved_config
    from ctxlm_ds.tokenizers.load import load_tokenizer

    config = load_saved_config(run_dir / "config.yaml")
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    objective = build_objective(config.objective, tokenizer)
    rows = build_run_rows(config.row_settings, tokenizer, objective).train
    batch = BatchRows(rows, config.data, config.training)
    console = Console(soft_wrap=True)
    planned, titles = batch.plan(first, count), batch.titles(first, count)
    for text in preview_planned(rows, objective, tokenizer, config.data, config.training.seed, planned, titles):
        console.print(text)


def batch() -> None:
    what = "Show rows of a run's training stream as the model read them: those of a recorded bad batch, or any stretch."
    other = "Without --step and --first-row: one line for each bad batch of RUN/history.jsonl."
    parser = argparse.ArgumentParser(description=what, epilog=other)
    parser.add_argument("run_dir", metavar="RUN", help="run directory")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=at_least(1), metavar="N", help="show the recorded bad batch of this step")
    which.add_argument("--first-row", type=at_least(0), metavar="P", help="show rows from this place of the stream")
    parser.add_argument("--count", type=at_least(1), metavar="C", help=f"rows (default: all; {ROWS_SHOWN} from P)")
    args = parser.parse_args()
    if args.count is not None and args.step is None and args.first_row is None:
        parser.error("--count goes with --step or --first-row")
    setup_logging()
    from ctxlm_ds.process.run_history import read_history

    run_dir = Path(args.run_dir)
    check_run(run_dir)
    events = [event for event in read_history(run_dir) if _has_rows(event)]
    if args.step is None and args.first_row is None:
        list_batches(run_dir, events)
        return
    show(run_dir, *find_stretch(args, events))


def build_samples() -> None:
    """Build the sample indexes of a recipe's datasets ahead of the job, without an accelerator.

    Training builds what is missing by itself; with this, a cluster's compute nodes do not wait for it.
    """
    parser = argparse.ArgumentParser(description=build_samples.__doc__)
    parser.add_argument("--config", required=True, metavar="RECIPE", help="a path, or the name of a shipped recipe")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="change settings")
    parser.add_argument("--show", type=at_least(0), default=0, metavar="N", help="print N rows as the model sees them")
    parser.add_argument(
        "--workers", type=at_least(1), metavar="N", help="threads (default: all cores); the files are the same"
    )
    args = parser.parse_args()
    setup_logging()
    from rich.console import Console

    from ctxlm_ds.data.stream.preview import preview_rows
    from ctxlm_ds.data.stream.run_datasets import build_run_rows
    from ctxlm_ds.data.stream.run_plan import plan_lines, summary_lines
    from ctxlm_ds.errors import ConfigError
    from ctxlm_ds.objectives.base import build_objective
    from ctxlm_ds.recipe.load import load_config
    from ctxlm_ds.recipe.phases import run_phases
    from ctxlm_ds.recipe.source_rules import source_names
    from ctxlm_ds.tokenizers.load import load_tokenizer

    config = load_config(args.config, args.set)
    if config.tokenizer.path is None or not config.data.train:
        raise ConfigError(f"{args.config}: tokenizer.path and data.train are needed; name them there or with --set")
    tokenizer = load_tokenizer(config.tokenizer.path)
    for phase in run_phases(config):
        config = phase.config
        objective = build_objective(config.objective, tokenizer)
        rows = build_run_rows(config.row_settings, tokenizer, objective, args.workers)
        indexes = dict(zip(source_names(config.data), rows.train.indexes, strict=True))
        held_out = {f"{name} (held out)": source.indexes[0] for name, source in rows.validation.items()}
        plan = plan_lines(config.data, config.training, config.evaluation, rows.train, rows.validation)
        title = [f"{phase.describe()}:"] if phase.count > 1 else []
        print("\n".join([*title, *summary_lines(indexes | held_out), *plan]))
        if args.show:
            console = Console(soft_wrap=True)
            for text in preview_rows(rows.train, objective, tokenizer, config.data, config.training, args.show):
                console.print(text)
