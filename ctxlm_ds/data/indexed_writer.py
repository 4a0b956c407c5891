"""Write Megatron's `.bin`/`.idx` and the JSON beside them, streaming and atomically.

Memory does not grow with the dataset: lengths go straight into the unfinished .idx, document boundaries into an
unnamed temporary file. All three files are written aside and flushed; the .idx, without which no reader (ours or
Megatron's) opens a dataset, gets its name last, so that a dataset is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ctxlm_ds.atomic import PARTIAL_MARK, fsync_path, partial_path, publish
from ctxlm_ds.data.indexed import DTYPES, HEADER, MAGIC, METADATA_FORMAT, METADATA_VERSION, VERSION, dataset_file
from ctxlm_ds.errors import DataError

logger = logging.getLogger("ctxlm_ds")

EXTENSIONS = ("bin", "json", "idx")
"""In the order in which finished files get their names."""
_COPY_ITEMS = 1 << 20


def refuse_existing(prefix: str | Path, overwrite: bool) -> None:
    """Raises DataError where a file of this dataset exists and may not be replaced."""
    existing = [str(path) for path in (dataset_file(prefix, extension) for extension in EXTENSIONS) if path.exists()]
    if existing and not overwrite:
        raise DataError(f"{', '.join(existing)} exist(s) already; choose another --output-prefix or pass --overwrite")


class IndexedDatasetWriter:
    """Streams one dataset; a context manager that leaves nothing behind unless `finalize` was reached."""

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any], overwrite: bool = False) -> None:
        """Raises DataError where the dataset exists and `overwrite` is not set, or `dtype` has no code."""
        refuse_existing(prefix, overwrite)
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in DTYPES.items() if known == self.dtype]
        if not codes or self.dtype.kind == "f":
            raise DataError(f"{self.prefix}: token ids cannot be stored as {self.dtype.name}")
        self._code = codes[0]
        self.num_sequences = self.num_documents = self.num_tokens = 0
        self._limits = np.iinfo(self.dtype)
        self._digest = hashlib.sha256()
        self._partial = {extension: partial_path(dataset_file(prefix, extension)) for extension in EXTENSIONS}
        self._open_files: list[IO[bytes]] = []
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._report_leftovers()
        try:
            self._bin = self._open(self._partial["bin"])
            self._idx = self._open(self._partial["idx"])
            self._documents: IO[bytes] = tempfile.TemporaryFile(dir=Path(prefix).parent)  # noqa: SIM115 (closed in close)
            self._open_files.append(self._documents)
            self._idx.write(bytes(HEADER.size))
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> IO[bytes]:
        file = open(path, "wb+")  # noqa: SIM115 (closed in close)
        self._open_files.append(file)
        return file

    def _report_leftovers(self) -> None:
        name = Path(self.prefix).name
        for extension in EXTENSIONS:
            for path in sorted(Path(self.prefix).parent.glob(f"{glob_escape(name)}.{extension}{PARTIAL_MARK}*")):
                logger.warning("%s is left from an interrupted run; remove it if none is running", path)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add_sequence(self, ids: ArrayLike) -> None:
        """Append one sequence to the current document. Raises DataError for an id that the dtype cannot hold."""
        tokens = np.asarray(ids, dtype=np.int64)
        self.add_sequences(tokens, [tokens.size])

    def add_sequences(self, tokens: NDArray[Any], lengths: Sequence[int] | NDArray[Any]) -> None:
        """Append several sequences, given flat with their lengths, to the current document."""
        sizes = np.asarray(lengths, dtype=np.int64)
        if int(sizes.sum()) != tokens.size or (sizes.size and sizes.min() < 0):
            raise DataError(f"{self.prefix}: lengths of {int(sizes.sum())} tokens for {tokens.size} tokens")
        if sizes.size and int(sizes.max()) > np.iinfo(np.int32).max:
            raise DataError(f"{self.prefix}: a sequence of {int(sizes.max())} tokens is longer than the format can say")
        if tokens.size and (int(tokens.min()) < self._limits.min or int(tokens.max()) > self._limits.max):
            limits = f"{self._limits.min} to {self._limits.max}"
            raise DataError(f"{self.prefix}: an id outside {limits} ({self.dtype.name}); the tokenizer does not fit")
        data = np.ascontiguousarray(tokens, dtype=self.dtype).tobytes()
        self._bin.write(data)
        self._digest.update(data)
        self._idx.write(sizes.astype("<i4").tobytes())
        self.num_sequences += sizes.size
        self.num_tokens += tokens.size

    def end_document(self) -> None:
        """Close the current document (one without sequences is allowed)."""
        self._documents.write(np.int64(self.num_sequences).astype("<i8").tobytes())
        self.num_documents += 1

    def prepare(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Complete and flush the files aside; the JSON as written: `metadata` and what the files hold."""
        self._finish_index()
        for extension in ("bin", "idx"):
            file = self._bin if extension == "bin" else self._idx
            file.flush()
            os.fsync(file.fileno())
        self._idx.seek(0)
        idx_digest = hashlib.sha256()
        while block := self._idx.read(1 << 20):
            idx_digest.update(block)
        complete = {
            "format": METADATA_FORMAT,
            "version": METADATA_VERSION,
            **metadata,
            "documents": self.num_documents,
            "sequences": self.num_sequences,
            "tokens": self.num_tokens,
            "dtype": self.dtype.name,
            "sha256": {"bin": self._digest.hexdigest(), "idx": idx_digest.hexdigest()},
        }
        self._partial["json"].write_text(json.dumps(complete, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        fsync_path(self._partial["json"])
        return complete

    def publish(self) -> None:
        """Give the prepared files their names, replacing an older dataset."""
        for file in self._open_files:
            file.close()
        for extension in reversed(EXTENSIONS):
            dataset_file(self.prefix, extension).unlink(missing_ok=True)
        for extension in EXTENSIONS:
            publish(self._partial[extension], dataset_file(self.prefix, extension))

    def finalize(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """`prepare` and `publish`."""
        complete = self.prepare(metadata)
        self.publish()
        return complete

    def close(self) -> None:
        """Remove whatever is not finished."""
        for file in self._open_files:
            with suppress(OSError):  # on a full disk closing flushes and fails again; the file goes anyway
                file.close()
        for path in self._partial.values():
            path.unlink(missing_ok=True)

    def _finish_index(self) -> None:
        end = 0
        for lengths in self._stored(self._idx, "<i4", HEADER.size, self.num_sequences):
            ends = end + np.cumsum(lengths, dtype=np.int64)
            pointers = (ends - lengths) * self.dtype.itemsize
            self._idx.seek(0, os.SEEK_END)
            self._idx.write(pointers.astype("<i8").tobytes())
            end = int(ends[-1])
        self._idx.seek(0, os.SEEK_END)
        self._idx.write(bytes(8))
        last = 0
        for indices in self._stored(self._documents, "<i8", 0, self.num_documents):
            self._idx.write(indices.tobytes())
            last = int(indices[-1])
        if last != self.num_sequences:
            raise DataError(f"{self.prefix}: {self.num_sequences - last} sequences are in no document (end_document)")
        self._idx.seek(0)
        self._idx.write(HEADER.pack(MAGIC, VERSION, self._code, self.num_sequences, self.num_documents + 1))

    @staticmethod
    def _stored(file: IO[bytes], dtype: str, offset: int, count: int) -> Iterator[NDArray[Any]]:
        item_bytes = np.dtype(dtype).itemsize
        for first in range(0, count, _COPY_ITEMS):
            file.seek(offset + first * item_bytes)
            yield np.frombuffer(file.read(min(_COPY_ITEMS, count - first) * item_bytes), dtype=dtype)


def glob_escape(name: str) -> str:
    """`name` with the characters that a pattern would read as wildcards taken literally."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)
