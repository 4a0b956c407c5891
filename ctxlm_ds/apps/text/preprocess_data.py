"""Turn documents into Megatron's indexed dataset (.bin/.idx) with a tokenizer's ids.

Writes OUTPUT_PREFIX_KEY_{sentence,document}.{bin,idx,json,sha256}, complete or not at all. An interrupted run leaves
OUTPUT_PREFIX_KEY_….partial/, from which the same command resumes. Only hf:// data sets are downloaded.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from ctxlm_ds.console import at_least, counted, format_duration, logger, setup_logging
from ctxlm_ds.data.sources.types import DOCUMENT_HELP, INPUT_FORMATS, InputShard
from ctxlm_ds.errors import ConfigError, TokenizerError

if TYPE_CHECKING:
    from ctxlm_ds.data.preprocess.job import PreprocessResult

INPUT_HELP = (
    "text (documents: --document), jsonl, WikiExtractor's output, each with .gz/.xz/.bz2/.zst or without, "
    "parquet, globs, or hf://NAME"
)

WITHOUT_EFFECT = (
    "--tokenizer-type", "--vocab-size", "--tokenizer-hf-use-fast", "--lang", "--keep-sequential-samples",
    "--log-interval", "--dataset-impl",
)  # fmt: skip
"""Options of Megatron-LM's tools/preprocess_data.py that change nothing here."""
AS_HERE = {"--partitions": ["1"], "--dataset-impl": ["mmap"]}
"""Values of its other options that change nothing here."""
MEGATRON = {
    **dict.fromkeys(("--vocab-extra-ids", "--legacy-tokenizer", "--tokenizer-metadata"),
                    "leave it out: the tokenizer's files decide it"),
    **dict.fromkeys(("--tiktoken-pattern", "--tiktoken-num-special-tokens", "--tiktoken-special-tokens"),
                    "a tiktoken vocabulary is not read; save it as a Hugging Face folder, for --tokenizer"),
    "--trust-remote-code": "leave it out: no code of a tokenizer is run",
    "--partitions": "--workers N for this machine; --shard I/N for jobs on several, then ctxlm merge",
    **dict.fromkeys(
        ("--find-optimal-num-workers", "--workers-to-check", "--max-documents", "--performance-dir"),
        "leave it out: --workers N (default: one per core) is not searched for",
    ),
}  # fmt: skip
"""Its other options, of any version, that are not options here: what to do instead."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group("input").add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help=INPUT_HELP)
    keys_help = "keys or columns; each gives a dataset (default: text)"
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help=keys_help)
    join_help = "one dataset, whose documents have the text of each key as a sequence (pairs: given_pairs)"
    add("--join-keys", action="store_true", help=join_help)
    spans_help = "key of [[first, after the last], ...]: characters of the text that are masked as units (jsonl)"
    add("--spans-key", default="", metavar="KEY", help=spans_help)
    add("--input-format", choices=INPUT_FORMATS, default="auto", help="default: by file name")
    add("--document", default="blank", metavar="UNIT", help=DOCUMENT_HELP)
    add("--shard", default="0/1", metavar="I/N", help="only part I (from 0) of N, for an array of jobs")
    skipped_help = "skip up to N damaged records (default: 0)"
    add("--max-bad-records", type=at_least(0), default=0, metavar="N", help=skipped_help)
    add("--split-sentences", action="store_true", help="a sequence is a sentence instead of a document")
    add("--keep-newlines", action="store_true", help="with --split-sentences: keep line ends")
    space_help = "with --split-sentences: encode the space between sentences (byte-level BPE; for rows that join them)"
    add("--leading-space", action="store_true", help=space_help)
    add = parser.add_argument_group("tokenizer").add_argument
    tokenizer_help = "folder of ctxlm tokenizer or of any Hugging Face tokenizer; vocab.txt, vocab.json or *.model"
    names = ("--tokenizer", "--tokenizer-model", "--vocab-file")
    add(*names, dest="tokenizer", required=True, metavar="DIR", help=tokenizer_help)
    merges_help = "merges of a vocab.json, in its folder (read without this option too)"
    add("--merge-file", type=Path, metavar="FILE", help=merges_help)
    eod_help = "end each document with [SEP], </s> or <|endoftext|> (GPT needs it)"
    add("--append-eod", action="store_true", help=eod_help)
    add("--prepend-bos", action="store_true", help="begin each document with <s> (LLaMA, next to --append-eod)")
    split_help = "encode names of special tokens inside texts (<unk>, [MASK]) as ordinary text, not as those tokens"
    add("--split-special-tokens", action="store_true", help=split_help)
    add = parser.add_argument_group("output").add_argument
    add("--output-prefix", required=True, metavar="PREFIX", help="path without extension")
    add("--overwrite", action="store_true", help="replace an existing dataset once the new one is complete")
    cores = len(os.sched_getaffinity(0))
    add("--workers", type=int, default=cores, metavar="N", help="worker processes (default: one per core)")
    return parser


def _show(result: PreprocessResult) -> None:
    from ctxlm_ds.data.dataset.inspection import unknown_advice

    facts = result.metadata
    skipped = f"{facts['empty_documents']:,} empty and {facts['bad_records']:,} bad ones skipped"
    size = f"{counted(facts['sequences'], 'sequence')}, {counted(facts['tokens'], 'token')}"
    size += f", {counted(facts['words'], 'word')}" if "words" in facts else ""
    print(f"{result.prefix}: {counted(facts['documents'], 'document')} ({skipped}), {size}")
    if (unknown := facts.get("unknown_tokens")) is not None:
        print(f"  unknown tokens: {unknown:,} ({unknown / max(1, facts['tokens']):.2%})")
        if advice := unknown_advice(unknown, facts["tokens"], facts):
            logger.warning("%s: %s", result.prefix, advice)
    for reason, count in facts["bad_record_reasons"].items():
        print(f"  skipped {count:,}: {reason} (the first in {result.prefix}.errors.jsonl)")


def _next_lines(results: list[PreprocessResult], num_shards: int) -> list[str]:
    if num_shards == 1:
        return [f"next: ctxlm inspect {shlex.quote(results[0].prefix)} --show 1"]
    joined = [shlex.quote(result.prefix.rpartition("_shard")[0]) for result in results]
    return [
        f"next, when all {num_shards} shards are there: ctxlm merge "
        f"--input {prefix}_shard*-of-{num_shards:05d}.idx --output-prefix {prefix}"
        for prefix in joined
    ]


def without_megatron(words: Sequence[str]) -> list[str]:
    """Return the arguments without those of Megatron's script that change nothing here, which are named once.

    Its options may have underscores. Raises ConfigError for options that would change the dataset.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in (*WITHOUT_EFFECT, *MEGATRON):
        parser.add_argument(name, dest=name, nargs="*")
    found, kept = parser.parse_known_args([re.sub("^--[^=]*", lambda m: m[0].replace("_", "-"), one) for one in words])
    given = vars(found)
    answers = {**MEGATRON, "--dataset-impl": "only mmap is written"}
    refused = {name: answers[name] for name in given if name in answers and given[name] != AS_HERE.get(name)}
    if refused:
        lines = [f"  {name}: {what}" for name, what in refused.items()]
        raise ConfigError("\n".join(["options of Megatron-LM's preprocess_data.py:", *lines]))
    if given:
        print(f"not needed here, ignored: {', '.join(given)}", file=sys.stderr)
    return kept


def check_merges(vocabulary: Path, merges: Path) -> None:
    """Raise TokenizerError if a merges file that is named separately is not the one that is read with a vocabulary."""
    from ctxlm_ds.tokenizers.kinds.bpe import merges_of
    from ctxlm_ds.tokenizers.load import find_vocabulary

    file = find_vocabulary(vocabulary)
    if file is None or file.suffix != ".json":
        raise TokenizerError(f"{merges}: {vocabulary} needs no merges; name the vocab.json that they belong to")
    if merges_of(file).resolve() != merges.resolve():
        raise TokenizerError(
            f"{merges}: the merges are read next to the vocabulary, {merges_of(file)}; put both files into one folder "
            "as vocab.json and merges.txt"
        )


def main() -> None:
    args = build_parser().parse_args(without_megatron(sys.argv[1:]))
    if args.merge_file is not None:
        check_merges(Path(args.tokenizer), args.merge_file)
    setup_logging()
    from ctxlm_ds.data.preprocess.job import PreprocessConfig, preprocess

    settings = {field.name: getattr(args, field.name) for field in fields(PreprocessConfig)}
    settings |= {"json_keys": tuple(args.json_keys), "shard": InputShard.parse(args.shard)}
    config = PreprocessConfig(**settings)
    start_s = time.monotonic()
    results = preprocess(args.input, args.tokenizer, args.output_prefix, config)
    for result in results:
        _show(result)
    if results[0].was_complete:
        print("complete already, nothing to do")
    else:
        characters, seconds = results[0].metadata["characters"], time.monotonic() - start_s
        amount = f"{characters / 1e6:,.1f} M" if characters >= 1e6 else f"{characters:,}"
        rate = characters / max(seconds, 1e-9)
        speed = f"{rate / 1e6:.2f} M/s" if rate >= 1e5 else f"{rate:,.0f}/s"
        print(f"{amount} characters in {format_duration(seconds)} ({speed})")
    print("\n".join(_next_lines(results, config.shard.count)))
