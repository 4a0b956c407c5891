"""Files of vectors: safetensors (a tensor, and where each sentence begins), Arrow (a row for each word or sentence)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.atomic import partial_path, publish
from ctxlm_ds.errors import ConfigError

Vectors = NDArray[np.float32]


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
