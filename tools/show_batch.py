"""Show the rows of a run's training stream as the model read them: of a bad batch on record, or of any stretch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ctxlm_ds.console import at_least, run_command, setup_logging

ROWS_SHOWN = 8


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="Without --step and --first-row: the bad batches of RUN/history.jsonl, a line each."
    )
    parser.add_argument("run_dir", metavar="RUN", help="run directory")
    parser.add_argument("--step", type=at_least(1), metavar="N", help="the bad batch on record for this step")
    parser.add_argument("--first-row", type=at_least(0), metavar="P", help="rows from this place of the stream")
    parser.add_argument("--count", type=at_least(1), metavar="C", help=f"rows (the whole batch; {ROWS_SHOWN} from P)")
    return parser


def find_stretch(args: argparse.Namespace, events: list[dict[str, Any]]) -> tuple[int, int]:
    """First place and number of rows that were asked for."""
    from ctxlm_ds.errors import DataError

    if args.first_row is not None:
        return args.first_row, args.count or ROWS_SHOWN
    found = [event["rows"] for event in events if event["step"] == args.step]
    if not found:
        steps = ", ".join(str(event["step"]) for event in events) or "none"
        raise DataError(f"{args.run_dir}/history.jsonl: no bad batch of step {args.step}; there are those of {steps}")
    first, count = found[-1]["first"], found[-1]["count"]
    return first, min(count, args.count or count)


def show(run_dir: Path, first: int, count: int) -> None:
    """Print the rows, from the run's own recipe and tokenizer."""
    from rich.console import Console

    from ctxlm_ds.config.load import load_config
    from ctxlm_ds.data.batch_rows import BatchRows
    from ctxlm_ds.data.preview import preview_planned
    from ctxlm_ds.data.run_rows import build_run_rows
    from ctxlm_ds.objectives.build import build_objective
    from ctxlm_ds.tokenizers.load import load_tokenizer

    config = load_config(run_dir / "config.yaml")
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    objective = build_objective(config.objective, tokenizer)
    rows = build_run_rows(config, tokenizer, objective).train
    batch = BatchRows(rows, config)
    console = Console(soft_wrap=True)
    planned, titles = batch.plan(first, count), batch.titles(first, count)
    for text in preview_planned(rows, objective, tokenizer, config, planned, titles):
        console.print(text)


def main() -> None:
    args = build_parser().parse_args()
    setup_logging()
    from ctxlm_ds.run_history import read_history

    run_dir = Path(args.run_dir)
    events = [event for event in read_history(run_dir) if "rows" in event]
    if args.step is None and args.first_row is None:
        for event in events:
            first, last = event["rows"]["first"], event["rows"]["first"] + event["rows"]["count"] - 1
            print(f"{event['event']} step {event['step']}, rows {first} to {last}: {event['why']}")
        return
    show(run_dir, *find_stretch(args, events))


if __name__ == "__main__":
    run_command(main)
