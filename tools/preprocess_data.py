"""Turn documents into Megatron's indexed dataset (.bin/.idx) with a tokenizer's ids.

Writes OUTPUT_PREFIX_KEY_{sentence,document}.{bin,idx,json}, complete or not at all. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os

from ctxlm_ds.console import format_duration, run_command, setup_logging

INPUT_HELP = "text (documents between blank lines), jsonl, either with .gz/.xz/.bz2/.zst, parquet, globs, or hf://NAME"


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_argument_group("input")
    source.add_argument("--input", nargs="+", required=True, metavar="FILE", help=INPUT_HELP)
    source.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys or columns; each gives a dataset (default: text)",
    )
    source.add_argument(
        "--input-format", choices=["auto", "text", "jsonl", "parquet"], default="auto", help="default: by file name"
    )
    source.add_argument(
        "--max-bad-records", type=int, default=0, metavar="N", help="skip up to N damaged records (default: 0)"
    )
    source.add_argument("--split-sentences", action="store_true", help="a sequence is a sentence instead of a document")
    source.add_argument("--keep-newlines", action="store_true", help="with --split-sentences: keep line ends")
    tokenization = parser.add_argument_group("tokenizer")
    tokenization.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR",
        help="folder of train_tokenizer.py or of any Hugging Face tokenizer",
    )
    tokenization.add_argument(
        "--append-eod", action="store_true", help="end each document with [SEP], </s> or <|endoftext|> (GPT needs it)"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path without extension")
    output.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    output.add_argument(
        "--workers", type=int, default=_num_cores(), metavar="N", help="worker processes (default: one a core)"
    )
    return parser


def main() -> None:
    args = build_parser().parse_args()
    setup_logging()
    from ctxlm_ds.data.preprocess import PreprocessConfig, preprocess

    config = PreprocessConfig(
        json_keys=tuple(args.json_keys),
        split_sentences=args.split_sentences,
        keep_newlines=args.keep_newlines,
        append_eod=args.append_eod,
        workers=args.workers,
        max_bad_records=args.max_bad_records,
        input_format=args.input_format,
        overwrite=args.overwrite,
    )
    results = preprocess(args.input, args.tokenizer, args.output_prefix, config)
    for result in results:
        facts = result.metadata
        skipped = f"{facts['empty_documents']:,} empty and {facts['bad_records']:,} bad ones skipped"
        size = f"{facts['sequences']:,} sequences, {facts['tokens']:,} tokens"
        print(f"{result.prefix}: {facts['documents']:,} documents ({skipped}), {size}")
    seconds, characters = results[0].seconds, results[0].metadata["characters"] / 1e6
    print(f"{characters:,.1f} M characters in {format_duration(seconds)} ({characters / max(seconds, 1e-9):.2f} M/s)")
    print(f"next: python tools/inspect_dataset.py {results[0].prefix} --show 1")


if __name__ == "__main__":
    run_command(main)
