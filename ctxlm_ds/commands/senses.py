"""Show the senses of a word: its occurrences in a text by their contextual vectors, next to its static vector."""

from __future__ import annotations

import argparse
from pathlib import Path

from ctxlm_ds.console import at_least, counted, setup_logging
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.installed import check_extra


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--word", required=True, help="one word; case is ignored in the text")
    add("--features", required=True, type=Path, metavar="DIR", help="model folder (Hugging Face's form, or ELMo)")
    add("--static", required=True, type=Path, metavar="FILE", help="static vectors (GloVe, word2vec)")
    add("--input", nargs="+", required=True, metavar="FILE", help="text: files, globs, hf://NAME")
    add("--json-key", default="text", metavar="KEY", help="key or column of the text (default: text)")
    add("--output", required=True, type=Path, metavar="FILE", help="the picture, .png")
    add("--layers", default="-1", metavar="WHICH", help="as in ctxlm embed, one vector of a word (default: -1)")
    add("--pooling", choices=["first", "mean", "last"], help="vector of a word of several subwords (default: mean)")
    add("--max-sentences", type=at_least(2), default=200, metavar="N", help="with the word (default: 200)")
    add("--senses", type=at_least(1), default=2, metavar="N", help="groups of occurrences (default: 2)")
    add("--neighbours", type=at_least(1), default=10, metavar="N", help="of each group (default: 10)")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    setup_logging()
    from ctxlm_ds.apps.downstream.features.choice import LayerChoice
    from ctxlm_ds.apps.downstream.features.senses import draw, find_occurrences, find_senses, static_neighbours
    from ctxlm_ds.apps.downstream.features.sources import open_source
    from ctxlm_ds.apps.downstream.features.static import StaticVectors, words_of_sentences
    from ctxlm_ds.atomic import write_bytes
    from ctxlm_ds.data.sources.corpus import Corpus

    check_extra("downstream", ["sklearn", "matplotlib"])
    choice = LayerChoice.parse(args.layers)
    if choice.how in ("all", "mix"):
        raise ConfigError(f"--layers {choice}: the picture needs one vector of a word, such as -1 or mean:4")
    source = open_source(args.features, args.pooling, default_pooling="mean")
    choice.check(source.num_layers, source)
    static = StaticVectors.read(args.static)
    corpus = Corpus(args.input, [args.json_key], key_flags="--json-key")
    occurrences = find_occurrences(words_of_sentences(corpus), args.word, args.max_sentences)
    around = static_neighbours(static, args.word, args.neighbours)
    found = find_senses(occurrences, source, choice, args.senses, args.neighbours)
    write_bytes(args.output, draw(found, static, [args.word, *around], f"{args.features.name}, layers {choice}"))
    print(f"static      {', '.join(around)}")
    for number, sense in enumerate(found.senses, 1):
        share = f"{len(sense.occurrences)} of {counted(len(found.occurrences), 'occurrence')}"
        print(f"group {number} of {len(found.senses)}: {share}")
        print(f"contextual  {', '.join(sense.neighbours)}")
        for at in sense.occurrences[:3]:
            print(f"            {found.occurrences[at].context}")
    print(f"{args.output}: the picture")
