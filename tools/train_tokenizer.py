"""Train a tokenizer (for BERT, RoBERTa or GPT-2) from text; writes a folder that transformers loads too."""

from __future__ import annotations

import argparse
import shlex

from ctxlm_ds.console import run_command, setup_logging


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="text, jsonl (also .gz/.xz/.zst), parquet, globs, hf://NAME",
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys or columns to read (default: text)"
    )
    parser.add_argument(
        "--input-format", choices=["auto", "text", "jsonl", "parquet"], default="auto", help="default: by file name"
    )
    parser.add_argument(
        "--type",
        choices=["wordpiece", "bpe", "gpt2"],
        required=True,
        help="wordpiece (BERT), byte-level bpe (RoBERTa) or gpt2 (byte-level, <|endoftext|> its only special token)",
    )
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="default: 30522 (wordpiece), 50265 (bpe) or 50257 (gpt2)"
    )
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument(
        "--cased", action="store_true", help="wordpiece: keep upper case and accents (default: uncased)"
    )
    parser.add_argument(
        "--add-prefix-space", action="store_true", help="bpe, gpt2: put a space before each text (the originals: no)"
    )
    parser.add_argument(
        "--min-frequency", type=int, default=2, metavar="N", help="least occurrences of a merged pair (default: 2)"
    )
    return parser


def main() -> None:
    args = build_parser().parse_args()
    setup_logging()
    from ctxlm_ds.data.corpus import Corpus
    from ctxlm_ds.tokenizers.train import train_tokenizer

    tokenizer = train_tokenizer(
        args.type,
        Corpus(args.input, args.json_keys, args.input_format),
        args.vocab_size,
        args.output_dir,
        lowercase=not args.cased,
        add_prefix_space=args.add_prefix_space,
        min_frequency=args.min_frequency,
    )
    size = f"{tokenizer.vocab_size:,} tokens, fingerprint {tokenizer.fingerprint[:12]}"
    print(f"{args.output_dir}: {tokenizer.kind}, {size}")
    words = ["python", "tools/preprocess_data.py", "--input", *args.input, "--tokenizer", args.output_dir]
    if args.json_keys != ["text"]:
        words += ["--json-keys", *args.json_keys]
    if args.input_format != "auto":
        words += ["--input-format", args.input_format]
    words += ["--output-prefix", "PREFIX", "--append-eod" if args.type == "gpt2" else "--split-sentences"]
    print(f"next: {shlex.join(words)}")


if __name__ == "__main__":
    run_command(main)
