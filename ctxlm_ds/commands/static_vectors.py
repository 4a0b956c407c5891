"""Train static vectors of words (word2vec, with gensim): what contextual vectors must beat."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from ctxlm_ds.console import at_least, counted, setup_logging

logger = logging.getLogger("ctxlm_ds")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="text: files, globs, hf://NAME")
    add("--json-key", default="text", metavar="KEY", help="key or column of the text (default: text)")
    add("--input-format", default="auto", metavar="FORMAT", help="if the file name does not show it (default: auto)")
    add("--output", required=True, type=Path, metavar="FILE", help="word2vec's text format, which GloVe's readers take")
    add("--max-words", type=at_least(1), metavar="N", help="stop after the first N words of the text")
    add("--width", type=at_least(1), default=100, metavar="N", help="of the vectors (default: 100)")
    add("--window", type=at_least(1), default=5, metavar="N", help="words to each side (default: 5)")
    add("--min-count", type=at_least(1), default=5, metavar="N", help="least occurrences of a word (default: 5)")
    add("--epochs", type=at_least(1), default=5, metavar="N", help="passes over the text (default: 5)")
    add("--architecture", choices=["skip-gram", "cbow"], default="skip-gram")
    add("--lower", action="store_true", help="write all words in lower case")
    add("--seed", type=at_least(0), default=1, metavar="N")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    setup_logging()
    from ctxlm_ds.apps.downstream.features.static import (
        Word2VecSettings,
        train_word2vec,
        words_of_sentences,
        write_text,
    )
    from ctxlm_ds.data.sources.corpus import Corpus

    texts = Corpus(args.input, [args.json_key], args.input_format, key_flags="--json-key")
    sentences, num_words = [], 0
    for words in words_of_sentences(text.lower() if args.lower else text for text in texts):
        sentences.append(words)
        num_words += len(words)
        if args.max_words and num_words >= args.max_words:
            break
    logger.info("%s in %s", counted(num_words, "word"), counted(len(sentences), "sentence"))
    settings = Word2VecSettings(args.width, args.window, args.min_count, args.epochs, args.architecture, seed=args.seed)
    vectors = train_word2vec(sentences, settings)
    write_text(args.output, vectors)
    logger.info("%s: vectors of %s", args.output, counted(len(vectors), "word"))
