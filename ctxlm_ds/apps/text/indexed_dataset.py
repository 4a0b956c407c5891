"""Indexed datasets and their rows: shown, proved, joined, and read as the model reads them."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ctxlm_ds.console import at_least, counted, format_size, logger, setup_logging
from ctxlm_ds.process.run_files import read_value

ROWS_OF_A_DATASET, ROWS_OF_A_RUN = 5, 8
"""That are shown if no number is given."""
CONFIG_NAME = "config.yaml"


def inspect() -> None:
    what = "Show an indexed dataset: its figures, documents as text, and (--verify) the proof that it is complete."
    parser = argparse.ArgumentParser(description=what)
    add = parser.add_argument
    add("prefix", metavar="PREFIX", help="path of the dataset without .bin/.idx")
    verify = "read every byte and check sizes, offsets, ids, checksums, tokenizer and text"
    add("--verify", action="store_true", help=verify)
    manifest = "--verify, then write PREFIX.sha256 (for a dataset without one)"
    add("--write-manifest", action="store_true", help=manifest)
    add("--show", type=at_least(0), default=0, metavar="N", help="print the beginnings of N documents")
    add("--first", type=at_least(0), default=0, metavar="I", help="first document to print (0)")
    add("--tokenizer", metavar="DIR", help="tokenizer folder (default: the one the dataset names)")
    objective = "show N rows as the model will see them under --config instead"
    add("--objective", action="store_true", help=objective)
    add("--config", metavar="RECIPE", help="recipe for --objective: a path, or a shipped one's name")
    add("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="change its settings")
    args = parser.parse_args()
    setup_logging()
    from ctxlm_ds.data.dataset import inspection
    from ctxlm_ds.data.dataset.reader import IndexedDataset

    dataset = IndexedDataset(args.prefix)
    print("\n".join(inspection.describe(dataset)))
    tokenizer = inspection.open_tokenizer(dataset, args.tokenizer) if args.tokenizer or args.show else None
    if (found := inspection.count_unknown(dataset, tokenizer)) is not None:
        unknown, tokens = found
        print(f"unknown       {unknown:,} of {tokens:,} tokens ({unknown / max(1, tokens):.2%})")
        if advice := inspection.unknown_advice(unknown, tokens, dataset.metadata):
            logger.warning("%s: %s", args.prefix, advice)
    if args.verify or args.write_manifest:
        for proof in inspection.verify_dataset(dataset, args.tokenizer, args.write_manifest):
            print(f"verified      {proof}")
    if args.objective:
        show_objective(args)
    elif args.show:
        for line in inspection.show_documents(dataset, tokenizer, args.show, args.first):
            print(line)


def show_objective(args: argparse.Namespace) -> None:
    """Print rows of this dataset as training makes them, without leaving files."""
    from ctxlm_ds.data.dataset.inspection import open_tokenizer
    from ctxlm_ds.data.dataset.reader import IndexedDataset
    from ctxlm_ds.data.index.build import excerpt
    from ctxlm_ds.data.stream.preview import preview_rows
    from ctxlm_ds.errors import ConfigError
    from ctxlm_ds.objectives.base import build_objective
    from ctxlm_ds.recipe.load import load_config

    if args.config is None:
        raise ConfigError("--objective needs a recipe: --config RECIPE.yaml")
    config = load_config(args.config, args.set)
    tokenizer = open_tokenizer(IndexedDataset(args.prefix), args.tokenizer or config.tokenizer.path)
    if tokenizer is None:
        raise ConfigError(f"{args.prefix}: names no tokenizer; give its folder with --tokenizer DIR")
    objective = build_objective(config.objective, tokenizer)
    count = args.show or ROWS_OF_A_DATASET
    with excerpt(args.prefix, tokenizer, config.row_settings, objective, count) as (rows, source):
        print(source)
        _print_rows(preview_rows(rows, objective, tokenizer, config.data, config.training, count))


def _print_rows(texts: Iterable[object]) -> None:
    from rich.console import Console

    console = Console(soft_wrap=True)
    for text in texts:
        console.print(text)


def merge() -> None:
    what = "Join indexed datasets into one, in the order given, without decoding them."
    parser = argparse.ArgumentParser(description=what)
    inputs = "prefixes or files in the order wanted, or a folder: every dataset in it, sorted by name"
    parser.add_argument("--input", nargs="+", required=True, metavar="PREFIX", help=inputs)
    parser.add_argument("--output-prefix", required=True, metavar="P", help="writes P.bin, P.idx, P.json and P.sha256")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    args = parser.parse_args()
    setup_logging()
    from ctxlm_ds.data.dataset.merge import merge_datasets

    result = merge_datasets(args.input, args.output_prefix, args.overwrite)
    joined = result.dataset
    numbers = {"document": joined.num_documents, "sequence": joined.num_sequences, "token": joined.num_tokens}
    counts = ", ".join(counted(number, noun) for noun, number in numbers.items())
    if result.complete_already:
        print(f"{joined.prefix}: complete already, nothing to do ({counts})")
        return
    num_bytes = joined.tokens.nbytes + joined.arrays.file.nbytes
    print(
        f"{joined.prefix}: {counted(result.num_parts, 'part')}, {counts}; {format_size(num_bytes)} in "
        f"{result.seconds:.1f} s, {format_size(num_bytes / max(1e-9, result.seconds))}/s"
    )
    print(f"next: ctxlm inspect {shlex.quote(joined.prefix)} --verify")


def _has_rows(event: Mapping[str, Any]) -> bool:
    """Return whether an event of the history, a file, is about the rows of a step."""
    rows, why, step = event.get("rows"), event.get("why"), read_value(event, "step", int)
    is_whole = isinstance(rows, dict) and all(read_value(rows, name, int) is not None for name in ("first", "count"))
    return is_whole and isinstance(why, str) and step is not None


def find_stretch(args: argparse.Namespace, events: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the first place and the number of the requested rows."""
    from ctxlm_ds.errors import DataError

    if args.first_row is not None:
        return args.first_row, args.count or ROWS_OF_A_RUN
    found = [event["rows"] for event in events if event["step"] == args.step]
    if not found:
        steps = ", ".join(dict.fromkeys(str(event["step"]) for event in events))
        others = f"recorded steps: {steps}" if steps else "no other step has one either"
        raise DataError(f"{args.run_dir}/history.jsonl: no bad batch of step {args.step}; {others}")
    first, count = found[-1]["first"], found[-1]["count"]
    return first, min(count, args.count or count)


def show(run_dir: Path, first: int, count: int) -> None:
    """Print the rows, from the run's recipe and tokenizer."""
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
    planned, titles = batch.plan(first, count), batch.titles(first, count)
    _print_rows(preview_planned(rows, objective, tokenizer, config.data, config.training.seed, planned, titles))


def batch() -> None:
    what = "Show rows of a run's training stream as the model read them: those of a recorded bad batch, or any stretch."
    other = "Without --step and --first-row: one line for each bad batch of RUN/history.jsonl."
    parser = argparse.ArgumentParser(description=what, epilog=other)
    parser.add_argument("run_dir", metavar="RUN", help="run directory")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=at_least(1), metavar="N", help="show the recorded bad batch of this step")
    which.add_argument("--first-row", type=at_least(0), metavar="P", help="show rows from this place of the stream")
    parser.add_argument("--count", type=at_least(1), metavar="C", help=f"rows (default: all; {ROWS_OF_A_RUN} from P)")
    args = parser.parse_args()
    if args.count is not None and args.step is None and args.first_row is None:
        parser.error("--count goes with --step or --first-row")
    setup_logging()
    from ctxlm_ds.apps.cluster.run_status import is_run
    from ctxlm_ds.errors import DataError
    from ctxlm_ds.process.run_history import read_history

    run_dir = Path(args.run_dir)
    if not run_dir.is_dir():
        raise DataError(f"{run_dir}: no such folder; give a run's directory, such as runs/NAME")
    if not is_run(run_dir) and not (run_dir / CONFIG_NAME).is_file():
        raise DataError(f"{run_dir} is no run: it has neither a {CONFIG_NAME} nor a history; give a run's directory")
    events = [event for event in read_history(run_dir) if _has_rows(event)]
    if args.step is not None or args.first_row is not None:
        return show(run_dir, *find_stretch(args, events))
    for event in events:
        first, last = event["rows"]["first"], event["rows"]["first"] + event["rows"]["count"] - 1
        print(f"{event['event']} step {event['step']}, rows {first} to {last}: {event['why']}")
    if not events:
        print(f"no bad batch is on record in {run_dir}")


def samples() -> None:
    """Build the sample indexes of a recipe's datasets ahead of the job, without an accelerator.

    Training builds what is missing by itself; with this, a cluster's compute nodes do not wait for it.
    """
    parser = argparse.ArgumentParser(description=samples.__doc__)
    parser.add_argument("--config", required=True, metavar="RECIPE", help="a path, or the name of a shipped recipe")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="change settings")
    parser.add_argument("--show", type=at_least(0), default=0, metavar="N", help="print N rows as the model sees them")
    parser.add_argument(
        "--workers", type=at_least(1), metavar="N", help="threads (default: all cores); the files are the same"
    )
    args = parser.parse_args()
    setup_logging()
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
            _print_rows(preview_rows(rows.train, objective, tokenizer, config.data, config.training, args.show))
