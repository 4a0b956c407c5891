"""Write vectors of words or sentences: of any layer of a model, joined layers, or static ones."""

from __future__ import annotations

import argparse
import logging
from itertools import islice
from pathlib import Path

from ctxlm_ds.console import at_least, counted, setup_logging
from ctxlm_ds.errors import ConfigError

logger = logging.getLogger("ctxlm_ds")
BLOCK = 1024
"""Sentences that are computed before they are written."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--features", required=True, type=Path, metavar="PATH",
        help="model folder (Hugging Face's form, or ELMo), or file of static vectors (GloVe, word2vec)")  # fmt: skip
    add("--input", nargs="+", required=True, metavar="FILE", help="text: files, globs, hf://NAME")
    add("--json-key", default="text", metavar="KEY", help="key or column of the text (default: text)")
    add("--input-format", default="auto", metavar="FORMAT", help="if the file name does not show it (default: auto)")
    add("--output", required=True, type=Path, metavar="FILE", help="ends in .safetensors or .arrow")
    add(
        "--layers",
        default="-1",
        metavar="WHICH",
        help="a layer (0: embeddings, -1: last), all, or {sum, mean, concat}:N of the last N (or `all`); default: -1",
    )
    add("--unit", choices=["words", "sentences"], default="words",
        help="a vector of each word, or the mean of each sentence's words")  # fmt: skip
    add("--pooling", choices=["first", "mean", "last"], help="vector of a word of several subwords (default: first)")
    add("--words", choices=["punctuation", "whitespace"], default="punctuation",
        help="a punctuation mark is a word, or only white space splits words (default: punctuation)")  # fmt: skip
    add("--lines", action="store_true", help="each line is a sentence; default: sentences are found by rule")
    add("--separate-directions", action="store_true", help="an ELMo of L layers gives 2L + 1, of one direction each")
    add("--max-sentences", type=at_least(1), metavar="N", help="stop after the first N")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    setup_logging()
    from ctxlm_ds.apps.downstream.features.choice import LayerChoice
    from ctxlm_ds.apps.downstream.features.static import words_of_lines, words_of_sentences
    from ctxlm_ds.apps.downstream.features.writers import check_name, vector_writer
    from ctxlm_ds.data.sources.corpus import Corpus

    choice = LayerChoice.parse(args.layers)
    if choice.how == "mix":
        raise ConfigError(f"--layers {choice}: a mix is trained with a task (ctxlm_ds.finetune); give mean:N or all")
    check_name(args.output)
    if not args.features.exists():
        raise ConfigError(f"--features {args.features}: no such file or folder")
    corpus = Corpus(args.input, [args.json_key], args.input_format, key_flags="--json-key")
    from ctxlm_ds.apps.downstream.features.sources import StaticSource, open_source
    from ctxlm_ds.process.library_noise import quiet_libraries

    quiet_libraries()
    source = open_source(args.features, args.pooling, separate=args.separate_directions)
    choice.check(source.num_layers, source)
    split = words_of_lines if args.lines else words_of_sentences
    sentences = islice(split(corpus, args.words == "whitespace"), args.max_sentences)
    facts = {"source": str(args.features), "layers": str(choice), "unit": args.unit}
    facts |= {"pooling": args.pooling or "first"}
    number = rows = 0
    with vector_writer(args.output, facts) as writer:
        while block := list(islice(sentences, BLOCK)):
            for words, layers in zip(block, source.vectors(block), strict=True):
                vectors, names = choice.select(layers).swapaxes(0, 1), words
                if args.unit == "sentences":
                    vectors, names = vectors.mean(axis=0, keepdims=True), [" ".join(words)]
                writer.add(number, names, vectors)
                number, rows = number + 1, rows + len(vectors)
        if not number:
            raise ConfigError(f"--input {' '.join(args.input)}: no text")
    if isinstance(source, StaticSource):
        share, total = source.num_unknown / max(1, source.num_words), counted(source.num_words, "word")
        logger.info("%.1f %% of %s have no vector in %s; theirs is zero", 100 * share, total, args.features)
    logger.info("%s: %s of %s", args.output, counted(rows, "vector"), counted(number, "sentence"))
