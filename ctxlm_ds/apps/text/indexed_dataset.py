"""Indexed datasets: figures, documents as text and the proof that one is complete; several joined into one."""

from __future__ import annotations

import argparse
import shlex

from ctxlm_ds.console import at_least, counted, format_size, logger, setup_logging

ROWS_SHOWN = 5


def parse_inspection() -> argparse.Namespace:
    """Parse the command line of `ctxlm inspect`."""
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
    return parser.parse_args()


def show_objective(args: argparse.Namespace) -> None:
    """Print rows of this dataset as training makes them, without leaving files."""
    from rich.console import Console

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
    console, count = Console(soft_wrap=True), args.show or ROWS_SHOWN
    with excerpt(args.prefix, tokenizer, config.row_settings, objective, count) as (rows, source):
        print(source)
        for text in preview_rows(rows, objective, tokenizer, config.data, config.training, count):
            console.print(text)


def inspect() -> None:
    args = parse_inspection()
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
