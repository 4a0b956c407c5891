"""Write Megatron's `.bin`/`.idx`, their JSON and their checksums, streaming and atomically.

Memory does not grow with the dataset: tokens, lengths and document ends go into three files of a separate folder, and
the .idx is made from them at the end. Everything is flushed before any file gets its name. The .idx, without which no
reader (ours or Megatron's) opens a dataset, gets its name last, so a dataset is complete or does not exist. An
interrupted job resumes from such a folder (LockedFolder) at the state of its last `save`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.atomic import fsync_path, publish
from ctxlm_ds.data.dataset.metadata import METADATA_FORMAT, METADATA_VERSION, dataset_manifest
from ctxlm_ds.data.dataset.reader import DTYPES, HEADER, LONGEST_SEQUENCE, MAGIC, VERSION, IndexedDataset, dataset_file
from ctxlm_ds.errors import DataError, RunLockedError
from ctxlm_ds.process.run_lock import RunLock

EXTENSIONS = ("bin", "spans", "json", "sha256", "errors.jsonl", "idx")
"""In the order in which finished files get their names; `errors.jsonl` exists only if records were skipped, `spans`
only if spans are given."""
_STREAMS = ("bin", "lengths", "documents")
_COPY_ITEMS = 1 << 20
_COPY_BYTES = 1 << 20
"""Read, hashed twice and written while it is in the processor's cache: blocks of 4 MB took 4 times as long."""


@dataclass(frozen=True, slots=True)
class WriterState:
    """Contents of an unfinished dataset."""

    sequences: int = 0
    documents: int = 0
    tokens: int = 0
    sha256: dict[str, str] = field(default_factory=dict)
    """Of the tokens, lengths and documents written so far, by the names of their files."""


class DamagedPartsError(DataError):
    """The files of an unfinished dataset are not what was written."""


def refuse_existing(prefix: str | Path, overwrite: bool, but: str = "") -> None:
    """Raise DataError if a file of this dataset exists and may not be replaced; `but` is added to the message."""
    existing = [str(path) for path in (dataset_file(prefix, extension) for extension in EXTENSIONS) if path.exists()]
    if existing and not overwrite:
        raise DataError(
            f"{', '.join(existing)} exist(s) already{but}; choose another --output-prefix or pass --overwrite"
        )


def part_file(folder: Path, prefix: str | Path, extension: str) -> Path:
    """Return the path of an unfinished file; its name opens as no dataset."""
    return folder / f"{Path(prefix).name}.{extension}.part"


def publish_parts(prefix: str | Path, folder: Path) -> None:
    """Give the prepared files of `folder` their names, replacing an older dataset; resumes if it was interrupted."""
    if part_file(folder, prefix, "bin").exists():
        for extension in reversed(EXTENSIONS):
            dataset_file(prefix, extension).unlink(missing_ok=True)
    for extension in EXTENSIONS:
        part = part_file(folder, prefix, extension)
        if part.exists():
            publish(part, dataset_file(prefix, extension))


class IndexedDatasetWriter:
    """The unfinished files of one dataset in a folder; a context manager that closes them."""

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype[Any],
        overwrite: bool,
        folder: Path,
        state: WriterState | None = None,
        with_spans: bool = False,
    ) -> None:
        """Open the files in `folder`, from where publish_parts moves them, to continue behind `state`.

        Raises DataError if the dataset exists and `overwrite` is not set, or `dtype` (of a token in .bin) has no code;
        DamagedPartsError if the files do not hold what `state` says.
        """
        refuse_existing(prefix, overwrite)
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in DTYPES.values() or self.dtype.kind == "f":
            raise DataError(f"{self.prefix}: token ids cannot be stored as {self.dtype.name}")
        state = state or WriterState()
        self.num_sequences, self.num_documents, self.num_tokens = state.sequences, state.documents, state.tokens
        self._limits = np.iinfo(self.dtype)
        self.with_spans = with_spans
        streams = (*_STREAMS, "spans") if with_spans else _STREAMS
        self._digests = {name: hashlib.sha256() for name in streams}
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}
        try:
            for name in streams:
                path = self._part(name)
                self._files[name] = open(path, "rb+" if path.exists() else "wb+")  # noqa: SIM115 (see close)
            self._cut_back(state)
        except BaseException:
            self.close()
            raise

    def _part(self, extension: str) -> Path:
        return part_file(self._folder, self.prefix, extension)

    def _cut_back(self, state: WriterState) -> None:
        """Remove what was written after the state, and hash what stays."""
        sizes = {
            "bin": state.tokens * self.dtype.itemsize, "lengths": state.sequences * 4, "documents": state.documents * 8,
            "spans": state.tokens,
        }  # fmt: skip
        for name, file in self._files.items():
            digest, size = self._digests[name], sizes[name]
            present = os.fstat(file.fileno()).st_size
            if present < size:
                raise DamagedPartsError(f"{file.name}: {present} bytes, {size} were written")
            file.truncate(size)
            while block := file.read(_COPY_BYTES):
                digest.update(block)
            if digest.hexdigest() != state.sha256.get(name, digest.hexdigest()):
                raise DamagedPartsError(f"{file.name}: changed since it was written (its sha256 is another one)")
            file.seek(size)

    def _write(self, name: str, data: bytes) -> None:
        self._files[name].write(data)
        self._digests[name].update(data)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_documents(
        self,
        tokens: NDArray[Any],
        lengths: Sequence[int] | NDArray[Any],
        document_sizes: NDArray[Any],
        continues_span: NDArray[np.uint8] | None = None,
    ) -> None:
        """Append documents: flat [tokens], the tokens of each of [sequences], and the sequences of each of [documents].

        `continues_span` is [tokens] 1 if a token belongs to the span of the token before it, only for `.spans`. Raises
        DataError for an id that the token type cannot hold, or a sequence too long for the format.
        """
        sizes = np.asarray(lengths, dtype=np.int64)
        assert sizes.sum() == tokens.size and document_sizes.sum() == sizes.size
        assert (continues_span is not None) == self.with_spans
        if sizes.size and int(sizes.max()) > LONGEST_SEQUENCE:
            raise DataError(f"{self.prefix}: a sequence of {int(sizes.max())} tokens is longer than the format can say")
        if tokens.size and (int(tokens.min()) < self._limits.min or int(tokens.max()) > self._limits.max):
            limits = f"{self._limits.min} to {self._limits.max}"
            raise DataError(f"{self.prefix}: an id outside {limits} ({self.dtype.name}); the tokenizer does not fit")
        self._write("bin", np.ascontiguousarray(tokens, dtype=self.dtype).tobytes())
        if continues_span is not None:
            assert continues_span.size == tokens.size
            self._write("spans", continues_span.tobytes())
        self._write("lengths", sizes.astype("<i4").tobytes())
        self._write("documents", (self.num_sequences + np.cumsum(document_sizes)).astype("<i8").tobytes())
        self.num_documents += len(document_sizes)
        self.num_sequences += sizes.size
        self.num_tokens += tokens.size

    def add_dataset(self, dataset: IndexedDataset, report: Callable[[int], object]) -> str:
        """Append all documents of a dataset of this token type in blocks and return the sha256 (hex) of its .bin.

        `report` gets the size of all tokens written so far. Raises DataError if the .bin ends early.
        """
        path, digest = dataset_file(dataset.prefix, "bin"), hashlib.sha256()
        written = self.num_tokens * self.dtype.itemsize
        end = written + dataset.num_tokens * self.dtype.itemsize
        with open(path, "rb", buffering=0) as source, ThreadPoolExecutor(1) as hashing:
            while block := source.read(min(_COPY_BYTES, end - written)):
                hashed = hashing.submit(digest.update, block)
                self._write("bin", block)
                hashed.result()
                written += len(block)
                report(written)
        if written != end:
            raise DataError(f"{path}: ends {end - written} bytes early; it was changed while it was being joined")
        if self.with_spans:
            for start in range(0, dataset.num_tokens, _COPY_BYTES):
                self._write("spans", dataset.continues_span[start : start + _COPY_BYTES].tobytes())
        lengths, ends = dataset.arrays.lengths, dataset.arrays.documents[1:]
        for start in range(0, len(lengths), _COPY_ITEMS):
            self._write("lengths", lengths[start : start + _COPY_ITEMS].astype("<i4").tobytes())
        for start in range(0, len(ends), _COPY_ITEMS):
            self._write("documents", (self.num_sequences + ends[start : start + _COPY_ITEMS]).astype("<i8").tobytes())
        self.num_documents += dataset.num_documents
        self.num_sequences += dataset.num_sequences
        self.num_tokens += dataset.num_tokens
        return digest.hexdigest()

    def save(self) -> WriterState:
        """Flush everything to the disk and return the state that an interrupted job resumes from."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        digests = {name: digest.hexdigest() for name, digest in self._digests.items()}
        return WriterState(self.num_sequences, self.num_documents, self.num_tokens, digests)

    def prepare(self, metadata: dict[str, Any] | None, errors: str = "") -> None:
        """Complete and flush the unfinished files.

        `metadata` and what the files hold are the JSON; without it there is none. `errors` is the content of
        `PREFIX.errors.jsonl`, which is written unless it is empty. Raises DataError if the lengths on the disk do not
        add up to the tokens.
        """
        self._write_index()
        sha256 = self.save().sha256
        digests: dict[str, str] = {name: sha256[name] for name in ("bin", "idx", "spans") if name in sha256}
        contents = {"errors.jsonl": errors.encode()}
        if metadata is not None:
            counts = {"documents": self.num_documents, "sequences": self.num_sequences, "tokens": self.num_tokens}
            head = {"format": METADATA_FORMAT, "version": METADATA_VERSION}
            complete = {**head, **metadata, **counts, "dtype": self.dtype.name, "sha256": digests}
            contents["json"] = (json.dumps(complete, indent=2, ensure_ascii=False) + "\n").encode(errors="replace")
            digests = digests | {"json": hashlib.sha256(contents["json"]).hexdigest()}
        contents["sha256"] = dataset_manifest(self.prefix, digests).encode()
        for extension, content in contents.items():
            path = self._part(extension)
            path.unlink(missing_ok=True)
            if content:
                path.write_bytes(content)
                fsync_path(path)

    def _write_index(self) -> None:
        self._files["idx"], self._digests["idx"] = open(self._part("idx"), "wb"), hashlib.sha256()  # noqa: SIM115
        code = next(code for code, known in DTYPES.items() if known == self.dtype)
        self._write("idx", HEADER.pack(MAGIC, VERSION, code, self.num_sequences, self.num_documents + 1))
        for lengths in self._stored("lengths", "<i4"):
            self._write("idx", lengths.tobytes())
        end = 0
        for lengths in self._stored("lengths", "<i4"):
            ends = end + np.cumsum(lengths, dtype=np.int64)
            self._write("idx", ((ends - lengths) * self.dtype.itemsize).astype("<i8").tobytes())
            end = int(ends[-1])
        if end != self.num_tokens:
            raise DataError(f"{self.prefix}: lengths of {end} tokens for {self.num_tokens} tokens; write it again")
        self._write("idx", bytes(8))
        for ends in self._stored("documents", "<i8"):
            self._write("idx", ends.tobytes())

    def _stored(self, name: str, dtype: str) -> Iterator[NDArray[Any]]:
        file = self._files[name]
        file.seek(0)
        while block := file.read(_COPY_BYTES):
            yield np.frombuffer(block, dtype=dtype)

    def close(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # on a full disk closing flushes and fails again
                file.close()


class LockedFolder:
    """Folder of unfinished files, locked while the block lasts; one that another process left is taken over.

    After an error it stays if it holds the file `progress_name`.
    """

    progress_name = ""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._lock = RunLock(self.path, remedy="choose another --output-prefix")

    def __enter__(self) -> LockedFolder:
        """Lock the folder. Raises DataError if another process works in it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except RunLockedError as error:
            raise DataError(str(error)) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(RunLockedError):  # another process took the lock over and works in the folder now
            self._lock.check()
            if kind is None or not self.is_kept:
                shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()

    @property
    def is_kept(self) -> bool:
        """True if the folder stays after an error."""
        return bool(self.progress_name) and (self.path / self.progress_name).exists()

    def check(self) -> None:
        """Raise RunLockedError if another process took the folder over (this one had been suspended)."""
        self._lock.check()

    def clear(self) -> bool:
        """Delete all unfinished files. Returns True if there were any."""
        left = [path for path in self.path.glob("*") if path.suffix == ".part" or path.name == self.progress_name]
        for path in left:
            path.unlink()
        return bool(left)
