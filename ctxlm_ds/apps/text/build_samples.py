"""Build the sample indexes of a recipe's datasets ahead of the job, without an accelerator.

Training builds what is missing by itself; with this, a cluster's compute nodes do not wait for it.
"""

from __future__ import annotations

import argparse

from ctxlm_ds.console import at_least, setup_logging


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, metavar="RECIPE", help="a path, or the name of a shipped recipe")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="change settings")
    parser.add_argument("--show", type=at_least(0), default=0, metavar="N", help="print N rows as the model sees them")
    parser.add_argument(
        "--workers", type=at_least(1), metavar="N", help="threads (default: all cores); the files are the same"
    )
    return parser


def main() -> None:
    args = build_parser().parse_args()
    setup_logging()
    from rich.console import Console

    from ctxlm_ds.data.stream.plan_table import plan_lines, summary_lines
    from ctxlm_ds.data.stream.preview import preview_rows
    from ctxlm_ds.data.stream.run_datasets import build_run_rows
    from ctxlm_ds.errors import ConfigError
    from ctxlm_ds.objectives.base import build_objective
    from ctxlm_ds.recipe.load import load_config
    from ctxlm_ds.recipe.source_rules import source_names
    from ctxlm_ds.tokenizers.load import load_tokenizer

    config = load_config(args.config, args.set)
    if config.tokenizer.path is None or not config.data.train:
        raise ConfigError(f"{args.config}: tokenizer.path and data.train are needed; name them there or with --set")
    tokenizer = load_tokenizer(config.tokenizer.path)
    objective = build_objective(config.objective, tokenizer)
    rows = build_run_rows(config.row_settings, tokenizer, objective, args.workers)
    indexes = dict(zip(source_names(config.data), rows.train.indexes, strict=True))
    held_out = {f"{name} (held out)": source.indexes[0] for name, source in rows.validation.items()}
    for line in (
        *summary_lines(indexes | held_out),
        *plan_lines(config.data, config.training, config.evaluation, rows.train, rows.validation),
    ):
        print(line)
    if args.show:
        console = Console(soft_wrap=True)
        for text in preview_rows(rows.train, objective, tokenizer, config.data, config.training, args.show):
            console.print(text)
