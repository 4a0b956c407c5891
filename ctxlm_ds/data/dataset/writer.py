"""Write Megatron's `.bin`/`.idx`, the JSON and the checksums beside them, streaming and atomically.

Memory does not grow with the dataset: tokens, lengths and document ends go into three files of a folder aside, from
which the .idx is made at the end. All is flushed before any file gets its name; the .idx, without which no reader (ours
or Megatron's) opens a dataset, gets its name last, so that a dataset is there whole or not at all. A folder that
outlives the writer (`folder`) is where an interrupted job goes on: at the state of its last `save`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ctxlm_ds.atomic import fsync_path, partial_path, publish, report_leftovers
from ctxlm_ds.data.dataset.checksums import manifest_text
from ctxlm_ds.data.dataset.index_file import DTYPES, HEADER, MAGIC, VERSION
from ctxlm_ds.data.dataset.metadata import METADATA_FORMAT, METADATA_VERSION
from ctxlm_ds.data.dataset.reader import dataset_file
from ctxlm_ds.errors import DataError

EXTENSIONS = ("bin", "json", "sha256", "errors.jsonl", "idx")
"""In the order in which finished files get their names; `errors.jsonl` is there only where records were skipped."""
_STREAMS = ("bin", "lengths", "documents")
_COPY_ITEMS = 1 << 20


@dataclass(frozen=True, slots=True)
class WriterState:
    """What an unfinished dataset holds."""

    sequences: int
    documents: int
    tokens: int
    sha256: dict[str, str]
    """Of the tokens, lengths and documents written so far, by the names of their files."""


class DamagedPartsError(DataError):
    """The files of an unfinished dataset are not what was written."""


def refuse_existing(prefix: str | Path, overwrite: bool) -> None:
    """Raises DataError where a file of this dataset exists and may not be replaced."""
    existing = [str(path) for path in (dataset_file(prefix, extension) for extension in EXTENSIONS) if path.exists()]
    if existing and not overwrite:
        raise DataError(f"{', '.join(existing)} exist(s) already; choose another --output-prefix or pass --overwrite")


def part_file(folder: Path, prefix: str | Path, extension: str) -> Path:
    """An unfinished file; its name opens as no dataset."""
    return folder / f"{Path(prefix).name}.{extension}.part"


def publish_parts(prefix: str | Path, folder: Path) -> None:
    """Give the prepared files of `folder` their names, replacing an older dataset; goes on where it was interrupted."""
    if part_file(folder, prefix, "bin").exists():
        for extension in reversed(EXTENSIONS):
            dataset_file(prefix, extension).unlink(missing_ok=True)
    for extension in EXTENSIONS:
        part = part_file(folder, prefix, extension)
        if part.exists():
            publish(part, dataset_file(prefix, extension))


class IndexedDatasetWriter:
    """Streams one dataset; a context manager that leaves nothing behind unless `finalize` was reached."""

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype[Any],
        overwrite: bool = False,
        folder: Path | None = None,
        state: WriterState | None = None,
    ) -> None:
        """Write in `folder`, which then is the caller's to remove, going on behind `state`.

        Raises DataError where the dataset exists and `overwrite` is not set or `dtype` has no code, and
        DamagedPartsError where the files of `folder` do not hold what `state` says.
        """
        refuse_existing(prefix, overwrite)
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in DTYPES.items() if known == self.dtype]
        if not codes or self.dtype.kind == "f":
            raise DataError(f"{self.prefix}: token ids cannot be stored as {self.dtype.name}")
        self._code = codes[0]
        state = state or WriterState(0, 0, 0, {})
        self.num_sequences, self.num_documents, self.num_tokens = state.sequences, state.documents, state.tokens
        self._limits = np.iinfo(self.dtype)
        self._digests = {name: hashlib.sha256() for name in _STREAMS}
        self._owns_folder = folder is None
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        if folder is None:
            report_leftovers(Path(prefix))
            folder = partial_path(Path(prefix))
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._open_files: list[IO[bytes]] = []
        try:
            _, self._lengths, self._documents = (self._open(name) for name in _STREAMS)
            self._cut_back(state)
        except BaseException:
            self.close()
            raise

    def _part(self, extension: str) -> Path:
        return part_file(self._folder, self.prefix, extension)

    def _open(self, name: str) -> IO[bytes]:
        path = self._part(name)
        file = open(path, "rb+" if path.exists() else "wb+")  # noqa: SIM115 (closed in close)
        self._open_files.append(file)
        return file

    def _cut_back(self, state: WriterState) -> None:
        """Take off what was written after the state, and hash what stays."""
        sizes = (state.tokens * self.dtype.itemsize, state.sequences * 4, state.documents * 8)
        for file, size, (name, digest) in zip(self._open_files, sizes, self._digests.items(), strict=True):
            present = os.fstat(file.fileno()).st_size
            if present < size:
                raise DamagedPartsError(f"{file.name}: {present} bytes where {size} were written")
            file.truncate(size)
            while block := file.read(1 << 20):
                digest.update(block)
            if digest.hexdigest() != state.sha256.get(name, digest.hexdigest()):
                raise DamagedPartsError(f"{file.name}: changed since it was written (its sha256 is another one)")
            file.seek(size)

    def _write(self, name: str, data: bytes) -> None:
        file = self._open_files[_STREAMS.index(name)]
        file.write(data)
        self._digests[name].update(data)

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
        self._write("bin", np.ascontiguousarray(tokens, dtype=self.dtype).tobytes())
        self._write("lengths", sizes.astype("<i4").tobytes())
        self.num_sequences += sizes.size
        self.num_tokens += tokens.size

    def end_document(self) -> None:
        """Close the current document (one without sequences is allowed)."""
        self._write("documents", np.int64(self.num_sequences).astype("<i8").tobytes())
        self.num_documents += 1

    def add_documents(
        self, tokens: NDArray[Any], lengths: Sequence[int] | NDArray[Any], document_sizes: NDArray[Any]
    ) -> None:
        """Append whole documents: tokens flat, [sequences] lengths, [documents] sequences of each."""
        first = self.num_sequences
        self.add_sequences(tokens, lengths)
        ends = first + np.cumsum(document_sizes, dtype=np.int64)
        if self.num_sequences != (int(ends[-1]) if ends.size else first):
            raise DataError(f"{self.prefix}: {len(lengths)} sequences for documents of {int(ends[-1]) - first}")
        self._write("documents", ends.astype("<i8").tobytes())
        self.num_documents += ends.size

    def save(self) -> WriterState:
        """Flush everything to the disk; where an interrupted job may go on."""
        for file in self._open_files:
            file.flush()
            os.fsync(file.fileno())
        digests = {name: digest.hexdigest() for name, digest in self._digests.items()}
        return WriterState(self.num_sequences, self.num_documents, self.num_tokens, digests)

    def prepare(self, metadata: dict[str, Any], errors: str = "") -> dict[str, Any]:
        """Complete and flush the files aside; the JSON as written: `metadata` and what the files hold.

        `errors` is the content of `PREFIX.errors.jsonl`, which is not written where it is empty. Raises DataError where
        lengths and documents do not add up to the tokens.
        """
        self.save()
        digests = {"bin": self._digests["bin"].hexdigest(), "idx": self._write_index()}
        complete = {
            "format": METADATA_FORMAT,
            "version": METADATA_VERSION,
            **metadata,
            "documents": self.num_documents,
            "sequences": self.num_sequences,
            "tokens": self.num_tokens,
            "dtype": self.dtype.name,
            "sha256": digests,
        }
        text = json.dumps(complete, indent=2, ensure_ascii=False) + "\n"
        digests_by_name = digests | {"json": hashlib.sha256(text.encode()).hexdigest()}
        name = Path(self.prefix).name
        manifest = manifest_text({f"{name}.{key}": digests_by_name[key] for key in sorted(digests_by_name)})
        self._part("errors.jsonl").unlink(missing_ok=True)
        for extension, content in (("json", text), ("sha256", manifest), ("errors.jsonl", errors)):
            if content:
                self._part(extension).write_text(content, encoding="utf-8")
                fsync_path(self._part(extension))
        return complete

    def publish(self) -> None:
        """Give the prepared files their names, replacing an older dataset."""
        self._close_files()
        publish_parts(self.prefix, self._folder)
        for name in _STREAMS:
            self._part(name).unlink(missing_ok=True)

    def finalize(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """`prepare` and `publish`."""
        complete = self.prepare(metadata)
        self.publish()
        self.close()
        return complete

    def close(self) -> None:
        """Close the files, and remove whatever is not finished unless the folder is the caller's."""
        self._close_files()
        if self._owns_folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _close_files(self) -> None:
        for file in self._open_files:
            with suppress(OSError):  # on a full disk closing flushes and fails again
                file.close()

    def _write_index(self) -> str:
        """Write the .idx from the lengths and the documents; its sha256."""
        digest = hashlib.sha256()
        with open(self._part("idx"), "wb") as file:

            def write(data: bytes) -> None:
                file.write(data)
                digest.update(data)

            write(HEADER.pack(MAGIC, VERSION, self._code, self.num_sequences, self.num_documents + 1))
            for lengths in self._stored(self._lengths, "<i4", self.num_sequences):
                write(lengths.tobytes())
            end = 0
            for lengths in self._stored(self._lengths, "<i4", self.num_sequences):
                ends = end + np.cumsum(lengths, dtype=np.int64)
                write(((ends - lengths) * self.dtype.itemsize).astype("<i8").tobytes())
                end = int(ends[-1])
            write(bytes(8))
            last = 0
            for indices in self._stored(self._documents, "<i8", self.num_documents):
                write(indices.tobytes())
                last = int(indices[-1])
            file.flush()
            os.fsync(file.fileno())
        if end != self.num_tokens:
            raise DataError(f"{self.prefix}: lengths of {end} tokens for {self.num_tokens} tokens; preprocess it again")
        if last != self.num_sequences:
            raise DataError(f"{self.prefix}: {self.num_sequences - last} sequences are in no document (end_document)")
        return digest.hexdigest()

    @staticmethod
    def _stored(file: IO[bytes], dtype: str, count: int) -> Iterator[NDArray[Any]]:
        item_bytes = np.dtype(dtype).itemsize
        file.seek(0)
        for first in range(0, count, _COPY_ITEMS):
            yield np.frombuffer(file.read(min(_COPY_ITEMS, count - first) * item_bytes), dtype=dtype)
