"""Build the sample indexes of a recipe's datasets ahead of the job, without an accelerator.

Training builds what is missing by itself; with this, a cluster's compute nodes do not wait for it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ctxlm_ds.console import run_command, setup_logging


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, metavar="RECIPE", help="a path, or the name of a shipped recipe")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="change settings")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N rows as the model will see them")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    setup_logging()
    from rich.console import Console

    from ctxlm_ds.config.load import load_config
    from ctxlm_ds.data.preview import preview_rows
    from ctxlm_ds.data.samples.build import build_sample_index
    from ctxlm_ds.data.samples.index import RowSource
    from ctxlm_ds.data.samples.summary import summary_table
    from ctxlm_ds.errors import ConfigError
    from ctxlm_ds.objectives.build import build_objective
    from ctxlm_ds.tokenizers.load import load_tokenizer

    config = load_config(args.config, args.set)
    if config.tokenizer.path is None or not config.data.train:
        raise ConfigError(f"{args.config}: tokenizer.path and data.train are needed; name them there or with --set")
    tokenizer = load_tokenizer(config.tokenizer.path)
    objective = build_objective(config.objective, tokenizer)
    indexes = {
        Path(prefix).name: build_sample_index(prefix, tokenizer, config, objective) for prefix in config.data.train
    }
    held_out = {
        f"{source.name} (held out)": build_sample_index(source.path, tokenizer, config, held_out=True)
        for source in config.data.validation
    }
    console = Console(soft_wrap=True)
    console.print(summary_table(indexes | held_out))
    if args.show:
        for text in preview_rows(RowSource(list(indexes.values())), objective, tokenizer, config, args.show):
            console.print(text)


if __name__ == "__main__":
    run_command(main)
