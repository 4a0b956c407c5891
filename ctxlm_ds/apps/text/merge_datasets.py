"""Join indexed datasets into one, in the order given, without decoding them."""

from __future__ import annotations

import argparse
import shlex

from ctxlm_ds.console import counted, format_size, setup_logging


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="datasets in the order wanted (prefixes, or their files), or a folder: every dataset in it, "
        "sorted by name",
    )
    parser.add_argument("--output-prefix", required=True, metavar="P", help="writes P.bin, P.idx, P.json and P.sha256")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    return parser


def main() -> None:
    args = build_parser().parse_args()
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
