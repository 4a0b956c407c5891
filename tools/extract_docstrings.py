"""Write the embedded corpus: the docstrings of the standard library, numpy and torch as jsonl (nothing is imported)."""

from __future__ import annotations

import argparse
import os

from ctxlm_ds.console import at_least, run_command, setup_logging


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output-dir", required=True, metavar="DIR", help="new folder for train.jsonl and heldout.jsonl"
    )
    parser.add_argument(
        "--packages", nargs="*", default=["numpy", "torch"], metavar="NAME", help="in addition to the standard library"
    )
    cores = os.cpu_count() or 1
    parser.add_argument("--workers", type=at_least(1), default=cores, metavar="N", help="default: all cores")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    setup_logging()
    from ctxlm_ds.data.sources.docstrings import FILES, extract_docstrings

    for split, (num_modules, num_bytes) in extract_docstrings(
        args.output_dir, tuple(args.packages), args.workers
    ).items():
        print(f"{args.output_dir}/{FILES[split]}: {num_modules:,} modules, {num_bytes / 1e6:.2f} MB")


if __name__ == "__main__":
    run_command(main)
