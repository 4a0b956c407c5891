"""Measure training steps or the loader beside transformers' own, as ratios taken round by round in one process."""

from __future__ import annotations

import argparse

from ctxlm_ds.console import run_command, setup_logging


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["pretrain", "loader"], help="steps of the model, or rows of the loader")
    parser.add_argument("--config", required=True, metavar="RECIPE", help="recipe: a path or the name of a shipped one")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="override settings")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds that count")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    setup_logging()
    from ctxlm_ds.config.load import load_config

    config = load_config(args.config, args.set)
    import torch

    from ctxlm_ds.benchmark.loaders import compare_loaders
    from ctxlm_ds.benchmark.steps import compare_steps

    if args.threads:
        torch.set_num_threads(args.threads)
    compare = compare_steps if args.what == "pretrain" else compare_loaders
    for line in compare(config, args.rounds).lines():
        print(line)


if __name__ == "__main__":
    run_command(main)
