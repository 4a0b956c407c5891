"""Train a tokenizer from text; writes a folder that transformers loads too (elmo: its word ids).

The same command again ends immediately. A folder that was made with other settings or of other texts is refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.console import aligned, setup_logging
from ctxlm_ds.data.sources.types import DOCUMENT_HELP

if TYPE_CHECKING:
    from ctxlm_ds.data.sources.corpus import Corpus

_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9}


def byte_count(text: str) -> int:
    """Return a number of bytes: `500M` -> 500,000,000."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    try:
        return int(float(text[:-1] if unit > 1 else text) * unit)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text}: a number such as 500M or 10G is needed") from error


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="files, globs, hf://NAME (docs/preprocessing.md)")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys or columns to read (default: text)")
    add("--input-format", default="auto", metavar="FORMAT", help="if the file name does not show it (default: auto)")
    add("--document", default="blank", metavar="UNIT", help=DOCUMENT_HELP)
    add("--max-bad-records", type=int, default=0, metavar="N", help="skip up to N damaged records")
    add("--output-dir", required=True, metavar="DIR", help="folder to write")
    types = (
        "wordpiece (BERT), bpe (byte-level, RoBERTa), gpt2 (byte-level), gpt1 (lower-cased characters), "
        "gpt1-words (for texts cleaned with gpt_words), unigram or sentencepiece-bpe (mBART, XLM-R), t5, "
        "albert and xlnet (unigram), elmo (words and their characters)"
    )
    add("--type", metavar="TYPE", required=True, help=types)
    add("--vocab-size", type=int, metavar="N", help="every id; default: the published model's of the type")
    sample = "train on a sample of complete documents of at most N bytes (500M, 10G), the same for the same seed"
    add("--max-sample-bytes", type=byte_count, metavar="N", help=sample)
    add("--sample-seed", type=int, metavar="N", help="seed of the sample (default: 0)")
    share = "sample languages by their share of the text to the power S (mBERT 0.7, XLM-R 0.3); with --language-key"
    add("--language-exponent", type=float, metavar="S", help=share)
    add("--language-key", metavar="KEY", help="key or column of a document's language")
    add("--special-tokens", nargs="+", metavar="NAME", help="further tokens, each with an id")
    add("--min-frequency", type=int, metavar="N", help="least occurrences of a merged pair; elmo: of a word")
    add("--cased", dest="lowercase", action="store_false", default=None, help="wordpiece: keep case and accents")
    add("--limit-alphabet", type=int, metavar="N", help="wordpiece, gpt1: largest alphabet (1000); the rest is unknown")
    add("--add-prefix-space", action="store_true", default=None, help="bpe, gpt2: a space before each text")
    add("--normalization", metavar="RULE", help="bpe, gpt2: none, nfc, nfkc ...; sentencepiece: nmt_nfkc, identity ...")
    add("--extra-ids", type=int, metavar="N", help="sentencepiece: T5's layout with N sentinels <extra_id_i> (T5: 100)")
    add("--language-codes", nargs="+", metavar="CODE", help="sentencepiece: mBART's layout (en_XX de_DE ...)")
    add("--character-coverage", type=float, metavar="X", help="sentencepiece: share of characters kept (0.9995)")
    add("--byte-fallback", action="store_true", default=None, help="sentencepiece: spell unknown text in bytes")
    add("--words", choices=["punctuation", "whitespace"], help="elmo: what separates words (punctuation)")
    add("--input-words", type=int, metavar="N", help="elmo: up to N further words that are only input, by characters")
    return parser


_SETTINGS = (
    "special_tokens", "min_frequency", "lowercase", "limit_alphabet", "add_prefix_space", "normalization",
    "extra_ids", "language_codes", "character_coverage", "byte_fallback", "words", "input_words",
    "max_sample_bytes", "sample_seed",
)  # fmt: skip


class LanguageSample:
    """Texts of several languages: a language's share of the bytes is that of the corpus to the power `exponent`.

    The shares are renormalised, and together the texts have about `max_bytes` (by default what the corpus has). A text
    comes several times if its language must be repeated; (seed, language, number in it) alone decide how often. Reads
    the documents twice and stores none. Source: google-research/bert, multilingual.md (0.7); Conneau & Lample 2019
    (arXiv:1901.07291), section 3.1.
    """

    def __init__(
        self,
        documents: Callable[[], Iterable[tuple[str, str]]],
        exponent: float,
        max_bytes: int | None = None,
        seed: int = 0,
    ) -> None:
        """Count the bytes of each language; `documents` returns the same (language, text) each time."""
        self._documents, self._seed = documents, seed
        found: Counter[str] = Counter()
        for language, text in documents():
            found[language] += len(text.encode())
        self.bytes_by_language: dict[str, int] = {language: size for language, size in sorted(found.items()) if size}
        total = sum(self.bytes_by_language.values())
        weights = {language: (size / total) ** exponent for language, size in self.bytes_by_language.items()}
        self.shares = {language: weight / sum(weights.values()) for language, weight in weights.items()}
        wanted = total if max_bytes is None else max_bytes
        self._copies = {one: self.shares[one] * wanted / size for one, size in self.bytes_by_language.items()}

    def __iter__(self) -> Iterator[str]:
        numbers: Counter[str] = Counter()
        for language, text in self._documents():
            if copies := self._copies.get(language):
                name = f"{self._seed}:{language}:{numbers[language]}".encode()
                numbers[language] += 1
                uniform = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") / 2**64
                for _ in range(int(copies + uniform)):
                    yield text

    def lines(self) -> Iterator[str]:
        """Yield a line for each language: its share of the corpus, of the sample, and how often its texts come."""
        total = sum(self.bytes_by_language.values())
        for language, size in self.bytes_by_language.items():
            share, copies = self.shares[language], self._copies[language]
            yield f"{language}: {size / total:.2%} of the text, {share:.2%} of the sample, x{copies:.3g}"


def sample_languages(corpus: Corpus, args: argparse.Namespace) -> Iterable[str]:
    """Return the texts of a LanguageSample, and show its shares."""
    from ctxlm_ds.errors import ConfigError

    if not 0.0 <= args.language_exponent <= 1.0:
        raise ConfigError(f"--language-exponent {args.language_exponent}: a number from 0 (even) to 1 (as they are)")

    def documents() -> Iterator[tuple[str, str]]:
        for document in corpus.documents():
            language = document[args.language_key] or "(none)"
            yield from ((language, document[key]) for key in args.json_keys)

    sample = LanguageSample(documents, args.language_exponent, args.max_sample_bytes, args.sample_seed or 0)
    print("\n".join(sample.lines()))
    return sample


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    setup_logging()
    from ctxlm_ds.apps.init.start import first_recipe_of, preprocess_options
    from ctxlm_ds.data.sources.corpus import Corpus
    from ctxlm_ds.data.sources.reading import source_signature
    from ctxlm_ds.tokenizers.train import tokenizer_types, train_tokenizer

    if args.type not in tokenizer_types():
        parser.error(f"--type {args.type}: choose one of {', '.join(tokenizer_types())}")
    if (args.language_exponent is None) != (args.language_key is None):
        parser.error("--language-exponent and --language-key go together")
    keys = [*args.json_keys, *([args.language_key] if args.language_key else [])]
    flags = "--json-keys and --language-key" if args.language_key else "--json-keys"
    corpus = Corpus(args.input, keys, args.input_format, args.max_bad_records, flags, args.document)
    settings = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name) is not None}
    source = {"json_keys": args.json_keys, "input": source_signature(corpus.sources)}
    texts: Iterable[str] = corpus
    existed = Path(args.output_dir).exists()
    if args.language_key:
        names = ("language_key", "language_exponent", "max_sample_bytes")
        source["languages"] = {name: getattr(args, name) for name in names}
        settings.pop("max_sample_bytes", None)  # the sample of languages has this size
        if not existed:
            texts = sample_languages(corpus, args)
    tokenizer = train_tokenizer(args.type, texts, args.vocab_size, args.output_dir, source=source, **settings)
    if existed:
        print(f"{args.output_dir}: complete already, nothing to do")
        return
    size = f"{tokenizer.vocab_size:,} tokens, fingerprint {tokenizer.fingerprint[:12]}"
    print(f"{args.output_dir}: {tokenizer.kind}, {size}; on up to 2 MB of the text it was made of:")
    record = tokenizer.facts.training
    print("\n".join(report_lines({args.output_dir: {**record, "languages": record["report"]}})))
    words = ["ctxlm", "preprocess", "--input", *args.input, "--tokenizer", args.output_dir]
    if args.json_keys != ["text"]:
        words += ["--json-keys", *args.json_keys]
    if args.input_format != "auto":
        words += ["--input-format", args.input_format]
    if args.document != "blank":
        words += ["--document", args.document]
    recipe = first_recipe_of(args.type)
    words += ["--output-prefix", "PREFIX", *(preprocess_options(recipe.data) if recipe is not None else ())]
    print(f"next: {shlex.join(words)}")


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


def report() -> None:
    what = (
        "Compare tokenizers on a text: vocabulary, tokens per word, unknown tokens, words with one token, by language."
    )
    parser = argparse.ArgumentParser(description=what)
    add = parser.add_argument
    add("--tokenizer", nargs="+", required=True, metavar="DIR", help="tokenizer folders, each a block of the table")
    add("--input", nargs="+", required=True, metavar="FILE", help="files, globs, hf://NAME; best held-out text")
    add("--json-key", default="text", metavar="KEY", help="key or column of the text (default: text)")
    add("--language-key", metavar="KEY", help="key or column of the language; default: all is one")
    add("--input-format", default="auto", metavar="FORMAT", help="if the file name does not show it (default: auto)")
    add("--max-bad-records", type=int, default=0, metavar="N", help="skip up to N damaged records")
    add("--max-sample-bytes", type=byte_count, default=50_000_000, metavar="N", help="of a keyed sample (default: 50M)")
    add("--json", metavar="FILE", help="write the figures to a file too")
    args = parser.parse_args()
    setup_logging()
    from ctxlm_ds.atomic import write_text
    from ctxlm_ds.data.sources.corpus import Corpus
    from ctxlm_ds.tokenizers.load import load_tokenizer
    from ctxlm_ds.tokenizers.train import ALL_LANGUAGES, KeyedSample, tokenizer_report

    tokenizers = {path: load_tokenizer(path) for path in args.tokenizer}
    keys = [args.json_key] + ([args.language_key] if args.language_key else [])
    sample = KeyedSample(args.max_sample_bytes)
    flags = "--json-key and --language-key" if args.language_key else "--json-key"
    for document in Corpus(args.input, keys, args.input_format, args.max_bad_records, flags).documents():
        language = document[args.language_key] if args.language_key else ALL_LANGUAGES
        sample.add([language or "(none)", document[args.json_key]])

    reports = {
        path: {
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "fingerprint": tokenizer.fingerprint,
            "languages": tokenizer_report(tokenizer, ((language, text) for language, text in sample)),
        }
        for path, tokenizer in tokenizers.items()
    }
    print("\n".join(report_lines(reports)))
    if args.json:
        write_text(Path(args.json), json.dumps(reports, indent=2, ensure_ascii=False) + "\n")
