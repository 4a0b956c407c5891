"""Compare tokenizers on a text: vocabulary, tokens per word, unknown tokens, words with one token, by language."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ctxlm_ds.console import aligned, setup_logging


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--tokenizer", nargs="+", required=True, metavar="DIR", help="tokenizer folders, each a block of the table")
    add("--input", nargs="+", required=True, metavar="FILE", help="files, globs, hf://NAME; best held-out text")
    add("--json-key", default="text", metavar="KEY", help="key or column of the text (default: text)")
    add("--language-key", metavar="KEY", help="key or column of the language; default: all is one")
    add("--input-format", default="auto", metavar="FORMAT", help="if the file name does not show it (default: auto)")
    add("--max-bad-records", type=int, default=0, metavar="N", help="skip up to N damaged records")
    add("--max-sample-bytes", type=float, default=50e6, metavar="N", help="of the text, a keyed sample (default: 5e7)")
    add("--json", metavar="FILE", help="write the figures to a file too")
    return parser


def report_lines(reports: dict[str, dict[str, Any]]) -> list[str]:
    """Return a table of reports by tokenizer, each {"vocab_size": ..., "languages": tokenizer_report(...)}."""
    rows = [[
        "tokenizer", "vocabulary", "language", "words", "tokens/word", "characters/token", "unknown", "whole words",
    ]]  # fmt: skip
    for name, report in reports.items():
        for language, rates in report["languages"].items():
            rows.append([
                name, f"{report['vocab_size']:,}", language, f"{rates['words']:,}", f"{rates['fertility']:.3f}",
                f"{rates['characters_per_token']:.2f}", f"{rates['unknown_rate']:.3%}", f"{rates['whole_words']:.1%}",
            ])  # fmt: skip
    return aligned(rows, left=(0, 2), indent="")


def main() -> None:
    args = build_parser().parse_args()
    setup_logging()
    from ctxlm_ds.atomic import write_text
    from ctxlm_ds.data.sources.corpus import Corpus
    from ctxlm_ds.tokenizers.load import load_tokenizer
    from ctxlm_ds.tokenizers.report import ALL_LANGUAGES, tokenizer_report
    from ctxlm_ds.tokenizers.sampling import KeyedSample

    tokenizers = {path: load_tokenizer(path) for path in args.tokenizer}
    keys = [args.json_key] + ([args.language_key] if args.language_key else [])
    sample = KeyedSample(int(args.max_sample_bytes))
    flags = "--json-key and --language-key" if args.language_key else "--json-key"
    for document in Corpus(args.input, keys, args.input_format, args.max_bad_records, flags).documents():
        language = document[args.language_key] if args.language_key else ALL_LANGUAGES
        sample.add([language or "(none)", document[args.json_key]])

    def documents() -> Iterator[tuple[str, str]]:
        return ((language, text) for language, text in sample)

    reports = {
        path: {
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "fingerprint": tokenizer.fingerprint,
            "languages": tokenizer_report(tokenizer, documents()),
        }
        for path, tokenizer in tokenizers.items()
    }
    print("\n".join(report_lines(reports)))
    if args.json:
        write_text(Path(args.json), json.dumps(reports, indent=2, ensure_ascii=False) + "\n")
