"""Write vectors of words or sentences: of any layer of a model, joined layers, or static ones.

A row is a word, or with `--unit sentences` a sentence; numbers are fp32. FILE.safetensors has `vectors` [rows, layers,
width] and `offsets` [sentences + 1]: sentence i has the rows from offsets[i] to before offsets[i + 1]. FILE.arrow has
the columns `sentence` (number from 0), `word` (or the words of the sentence) and `layer_0`, `layer_1`, ... (lists of
the width). The metadata of both name source, layers, unit and pooling.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, tee
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ctxlm_ds.atomic import partial_path, publish
from ctxlm_ds.console import at_least, byte_progress, counted, logger, setup_logging
from ctxlm_ds.errors import ConfigError

if TYPE_CHECKING:
    from ctxlm_ds.apps.downstream.features.options import LayerChoice
    from ctxlm_ds.apps.downstream.features.sources import FeatureSource, Vectors

Unit: TypeAlias = "tuple[list[str], Vectors]"
"""The words of a sentence (or its text) and their vectors [words, layers, width]."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--features", required=True, type=Path, metavar="PATH",
        help="model folder (Hugging Face's form, or ELMo), or file of static vectors (GloVe, word2vec)")  # fmt: skip
    add("--input", nargs="+", required=True, metavar="FILE", help="text: files, globs, hf://NAME")
    add("--json-key", default="text", metavar="KEY", help="key or column of the text (default: text)")
    add("--input-format", default="auto", metavar="FORMAT", help="if the file name does not show it (default: auto)")
    add("--output", required=True, type=Path, metavar="FILE", help="ends in .safetensors or .arrow")
    add("--layers", default="-1", metavar="WHICH", help="a layer (0: embeddings, -1: last), all, or {sum, mean, "
        "concat}:N of the last N (or `all`); default: -1")  # fmt: skip
    add("--unit", choices=["words", "sentences"], default="words",
        help="a vector of each word, or the mean of each sentence's words")  # fmt: skip
    add("--pooling", choices=["first", "mean", "last"], help="vector of a word of several subwords (default: first)")
    add("--words", choices=["punctuation", "whitespace"], default="punctuation",
        help="a punctuation mark is a word, or only white space splits words (default: punctuation)")  # fmt: skip
    add("--lines", action="store_true", help="each line is a sentence; default: sentences are found by rule")
    add("--separate-directions", action="store_true", help="an ELMo of L layers gives 2L + 1, of one direction each")
    add("--max-sentences", type=at_least(1), metavar="N", help="stop after the first N")
    add("--split-special-tokens", action="store_true", default=None, help="names such as </s> in texts stay text")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    setup_logging()
    from ctxlm_ds.apps.downstream.features.options import LayerChoice
    from ctxlm_ds.data.sources.corpus import Corpus

    choice = LayerChoice.parse(args.layers)
    if choice.how == "mix":
        raise ConfigError(f"--layers {choice}: a mix is trained with a task (ctxlm_ds.finetune); give mean:N or all")
    if args.output.suffix not in WRITERS:
        raise ConfigError(f"--output {args.output}: the name ends in {' or '.join(WRITERS)}")
    corpus = Corpus(args.input, [args.json_key], args.input_format, key_flags="--json-key")
    from ctxlm_ds.apps.downstream.features.sources import StaticSource, open_source
    from ctxlm_ds.process.launch import quiet_libraries

    quiet_libraries()
    logger.info("loading %s", args.features)
    source = open_source(args.features, args.pooling, None, args.separate_directions, args.split_special_tokens)
    choice.check(source.num_layers, source)
    sentences = islice(split_texts(corpus, args.lines, args.words == "whitespace"), args.max_sentences)
    first = next(sentences, None)
    if first is None:
        raise ConfigError(f"--input {' '.join(args.input)}: no text")
    facts = {"source": str(args.features), "layers": str(choice), "unit": args.unit, "pooling": args.pooling or "first"}
    units = vectors_of(chain([first], sentences), source, choice, args.unit == "sentences")
    number, rows = write_vectors(args.output, units, facts)
    if isinstance(source, StaticSource):
        share, total = source.num_unknown / max(1, source.num_words), counted(source.num_words, "word")
        logger.info("%.1f %% of %s have no vector in %s; theirs is zero", 100 * share, total, args.features)
    logger.info("%s: %s of %s", args.output, counted(rows, "vector"), counted(number, "sentence"))


def split_texts(texts: Iterable[str], lines: bool, is_split: bool) -> Iterator[list[str]]:
    """Yield the words of each sentence (or line) of some texts; with `is_split` white space separates all words."""
    from ctxlm_ds.apps.downstream.features.sources import split_words
    from ctxlm_ds.data.preprocess.sentences import split_sentences

    for text in texts:
        for sentence in text.split("\n") if lines else split_sentences(text):
            words = sentence.split() if is_split else split_words(sentence)
            if words:
                yield words


def vectors_of(
    sentences: Iterator[list[str]], source: FeatureSource, choice: LayerChoice, join: bool
) -> Iterator[Unit]:
    """Yield words and vectors of each sentence; with `join` its text and the mean of its words' vectors."""
    texts, read = tee(sentences)
    with byte_progress("vectors", 0) as progress:
        for number, (words, layers) in enumerate(zip(texts, source.vectors(read), strict=True), 1):
            vectors = choice.select(layers).swapaxes(0, 1)
            yield ([" ".join(words)], vectors.mean(axis=0, keepdims=True)) if join else (words, vectors)
            progress.update(0, counted(number, "sentence"))


def write_vectors(path: Path, units: Iterator[Unit], facts: dict[str, str]) -> tuple[int, int]:
    """Write a file in the form of its suffix, complete or not at all; return the numbers of sentences and of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    try:
        sizes = WRITERS[path.suffix](partial, units, facts)
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return sizes


def write_safetensors(path: Path, units: Iterator[Unit], facts: dict[str, str]) -> tuple[int, int]:
    """Write `vectors` and `offsets`; all vectors are kept in memory until the end."""
    import numpy as np
    from safetensors.numpy import save_file

    vectors = [vectors for _, vectors in units]
    offsets = np.cumsum([0, *map(len, vectors)], dtype=np.int64)
    # safetensors writes the memory of an array as it lies and ignores strides.
    save_file({"vectors": np.ascontiguousarray(np.concatenate(vectors)), "offsets": offsets}, path, metadata=facts)
    return len(vectors), int(offsets[-1])


def write_arrow(path: Path, units: Iterator[Unit], facts: dict[str, str]) -> tuple[int, int]:
    """Write the columns, a batch for each sentence."""
    import numpy as np
    import pyarrow as pa

    writer: Any = None
    number = rows = 0
    for number, (words, vectors) in enumerate(units, 1):
        columns: dict[str, Any] = {"sentence": pa.array([number - 1] * len(words), pa.int64()), "word": pa.array(words)}
        for layer in range(vectors.shape[1]):
            values = pa.array(np.ascontiguousarray(vectors[:, layer]).reshape(-1))
            columns[f"layer_{layer}"] = pa.FixedSizeListArray.from_arrays(values, vectors.shape[2])
        batch = pa.record_batch(columns).replace_schema_metadata(facts)
        writer = writer or pa.ipc.new_file(str(path), batch.schema)
        writer.write_batch(batch)
        rows += len(words)
    writer.close()
    return number, rows


WRITERS: dict[str, Callable[[Path, Iterator[Unit], dict[str, str]], tuple[int, int]]] = {
    ".safetensors": write_safetensors,
    ".arrow": write_arrow,
}
