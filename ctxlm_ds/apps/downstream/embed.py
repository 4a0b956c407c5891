"""Write vectors of words or sentences: of any layer of a model, joined layers, or static ones.

The file is safetensors (a tensor, and where each sentence begins) or Arrow (a row for each word or sentence).
"""

from __future__ import annotations

import argparse
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.atomic import partial_path, publish
from ctxlm_ds.console import at_least, counted, setup_logging
from ctxlm_ds.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]

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
    from ctxlm_ds.apps.downstream.features.options import LayerChoice
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


def words_of_sentences(texts: Iterable[str], is_split: bool = False) -> Iterator[list[str]]:
    """Yield the words of each sentence of some texts; with `is_split` white space separates all words."""
    from ctxlm_ds.data.preprocess.sentences import split_sentences

    for text in texts:
        yield from _words_of(split_sentences(text), is_split)


def words_of_lines(texts: Iterable[str], is_split: bool = False) -> Iterator[list[str]]:
    """Yield the words of each line of some texts; with `is_split` white space separates all words."""
    for text in texts:
        yield from _words_of(text.split("\n"), is_split)


def _words_of(sentences: Iterable[str], is_split: bool) -> Iterator[list[str]]:
    from ctxlm_ds.apps.downstream.features.static import split_words

    every = (sentence.split() if is_split else split_words(sentence) for sentence in sentences)
    return (words for words in every if words)


class VectorWriter(ABC):
    """Receives the vectors of sentences in order."""

    @abstractmethod
    def add(self, sentence: int, words: Sequence[str], vectors: Vectors) -> None:
        """Add a sentence.

        Args:
            sentence: its number.
            words: its words; one text if the vector is that of the complete sentence.
            vectors: [words, layers, width].
        """

    @abstractmethod
    def finish(self) -> None:
        """Write what is left."""


class SafetensorsWriter(VectorWriter):
    """`vectors` [rows, layers, width] and `offsets` [sentences + 1]: sentence i has rows offsets[i] to offsets[i + 1].

    All vectors are kept in memory until the end.
    """

    def __init__(self, path: Path, facts: dict[str, str]) -> None:
        self._path = path
        self._facts = facts
        self._vectors: list[Vectors] = []
        self._offsets = [0]

    def add(self, sentence: int, words: Sequence[str], vectors: Vectors) -> None:
        self._vectors.append(vectors)
        self._offsets.append(self._offsets[-1] + len(vectors))

    def finish(self) -> None:
        import numpy as np
        from safetensors.numpy import save_file

        tensors: dict[str, NDArray[Any]] = {
            "vectors": np.concatenate(self._vectors),
            "offsets": np.array(self._offsets, dtype=np.int64),
        }
        save_file(tensors, self._path, metadata=self._facts)


class ArrowWriter(VectorWriter):
    """Columns `sentence`, `word` and `layer_0`, `layer_1`, …: lists of fixed size; in batches, not in memory."""

    def __init__(self, path: Path, facts: dict[str, str]) -> None:
        self._path = path
        self._facts = facts
        self._writer: Any = None

    def add(self, sentence: int, words: Sequence[str], vectors: Vectors) -> None:
        import numpy as np
        import pyarrow as pa

        columns: dict[str, Any] = {"sentence": pa.array([sentence] * len(words), pa.int64()), "word": pa.array(words)}
        for layer in range(vectors.shape[1]):
            values = pa.array(np.ascontiguousarray(vectors[:, layer]).reshape(-1))
            columns[f"layer_{layer}"] = pa.FixedSizeListArray.from_arrays(values, vectors.shape[2])
        batch = pa.record_batch(columns)
        if self._writer is None:
            self._writer = pa.ipc.new_file(str(self._path), batch.schema.with_metadata(self._facts))
        self._writer.write_batch(batch.replace_schema_metadata(self._facts))

    def finish(self) -> None:
        self._writer.close()


WRITERS: dict[str, type[SafetensorsWriter] | type[ArrowWriter]] = {
    ".safetensors": SafetensorsWriter,
    ".arrow": ArrowWriter,
}


def check_name(path: Path) -> None:
    """Raise ConfigError if no writer has the suffix of a path."""
    if path.suffix not in WRITERS:
        raise ConfigError(f"--output {path}: the name ends in {' or '.join(WRITERS)}")


@contextmanager
def vector_writer(path: Path, facts: dict[str, str]) -> Iterator[VectorWriter]:
    """Yield the writer of a path (by its suffix); the file appears when all is written.

    Args:
        path: ends in .safetensors or .arrow.
        facts: go into the file's metadata.
    """
    check_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    try:
        writer = WRITERS[path.suffix](partial, facts)
        yield writer
        writer.finish()
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)
