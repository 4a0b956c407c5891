"""Join datasets into one without decoding them: .bin copied in blocks, .idx streamed, all checksums checked meanwhile.

In: prefixes, in the order wanted. Out: the files that one preprocessing of the whole would have written (the JSON lists
the parts as well). Memory does not grow with the tokens. All files are written aside; the .idx, without which no reader
opens a dataset, gets its name last. Not here: which prefixes are meant, and whether they belong together
(merge_inputs.py).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ctxlm_ds.atomic import fsync_path, is_full_disk, partial_path, report_leftovers
from ctxlm_ds.console import ByteProgress, byte_progress, format_size
from ctxlm_ds.data.dataset.checksums import dataset_manifest
from ctxlm_ds.data.dataset.joining import Joiner, digest_of, index_blocks, index_bytes
from ctxlm_ds.data.dataset.merge_inputs import Part, build_key, find_parts, merged_metadata, open_parts
from ctxlm_ds.data.dataset.reader import IndexedDataset, dataset_file
from ctxlm_ds.data.dataset.writer import EXTENSIONS, part_file, publish_parts
from ctxlm_ds.data.preprocess.pool import stop_signals_interrupt
from ctxlm_ds.errors import DataError

_MAX_ERROR_LINES = 1000


@dataclass(frozen=True, slots=True)
class MergeResult:
    """A joined dataset."""

    prefix: str
    num_parts: int
    num_documents: int
    num_sequences: int
    num_tokens: int
    num_bytes: int
    """Size of .bin and .idx together."""
    seconds: float
    complete_already: bool
    """It was there, joined from the same parts, and was left as it is."""


def merge_datasets(inputs: Sequence[str], output_prefix: str | Path, overwrite: bool = False) -> MergeResult:
    """Join datasets (prefixes, or folders of them) in the order given.

    Raises:
        DataError: parts do not belong together, one is missing or damaged, the output exists and was made of something
            else, or the disk is full; whatever was written is removed first.
    """
    start_s = time.monotonic()
    output = str(output_prefix)
    parts = open_parts(find_parts(inputs, output))
    complete = not overwrite and _is_complete(output, parts)
    if not complete:
        _refuse_existing(output, overwrite)
        _write(output, parts, overwrite)
    return MergeResult(
        prefix=output,
        num_parts=len(parts),
        num_documents=sum(part.num_documents for part in parts),
        num_sequences=sum(part.num_sequences for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
        num_bytes=_num_bytes(parts),
        seconds=time.monotonic() - start_s,
        complete_already=complete,
    )


def _bin_bytes(parts: Sequence[Part]) -> int:
    return sum(part.num_tokens for part in parts) * parts[0].dtype.itemsize


def _num_bytes(parts: Sequence[Part]) -> int:
    return _bin_bytes(parts) + index_bytes(parts)


def _is_complete(output: str, parts: Sequence[Part]) -> bool:
    """Whether the output is there and was joined from these very parts (its tokens are not read again)."""
    if not all(dataset_file(output, name).is_file() for name in ("bin", "idx")):
        return False
    try:
        present = IndexedDataset(output)
        index_digest = present.index_digest
    except DataError:
        return False
    if parts[0].metadata is not None:
        return present.metadata is not None and present.metadata.get("build_key") == build_key(parts)
    # Megatron's parts have no JSON to compare; the index tells the length of every sequence of every part.
    same_size = present.metadata is None and present.tokens.nbytes == _bin_bytes(parts)
    return same_size and index_digest == digest_of(index_blocks(parts))


def _refuse_existing(output: str, overwrite: bool) -> None:
    existing = [str(path) for path in (dataset_file(output, name) for name in EXTENSIONS) if path.exists()]
    if existing and not overwrite:
        raise DataError(
            f"{', '.join(existing)} exist(s) already, and not as these parts joined; choose another --output-prefix or "
            "pass --overwrite"
        )


def _write(output: str, parts: Sequence[Part], overwrite: bool) -> None:
    folder = Path(output).parent
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = _num_bytes(parts), shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(
            f"{folder}: {format_size(free)} are free, the joined dataset takes {format_size(needed)}; free some space "
            "or choose another --output-prefix"
        )
    report_leftovers(Path(output))
    aside = partial_path(Path(output))
    try:
        with stop_signals_interrupt():
            aside.mkdir()
            _write_aside(output, parts, aside)
            _refuse_existing(output, overwrite)  # another join may have finished meanwhile
            publish_parts(output, aside)
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise DataError(
            f"{folder}: {error.strerror}; nothing was kept, free some space or choose another --output-prefix"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_aside(output: str, parts: Sequence[Part], folder: Path) -> None:
    """Write all files of the joined dataset into `folder` and flush them."""
    with byte_progress("merge", _num_bytes(parts)) as progress:
        digests = {"bin": _write_tokens(parts, part_file(folder, output, "bin"), progress)}
        digests["idx"] = _write_index(parts, part_file(folder, output, "idx"), progress)
    small: dict[str, bytes] = {}
    metadata = merged_metadata(parts, _counts(parts), dict(digests))
    if metadata is not None:
        small["json"] = (json.dumps(metadata, indent=2, ensure_ascii=False) + "\n").encode()
        digests["json"] = hashlib.sha256(small["json"]).hexdigest()
    small["errors.jsonl"] = b"".join(islice(_error_lines(parts), _MAX_ERROR_LINES))
    small["sha256"] = dataset_manifest(output, digests).encode()
    for extension, content in small.items():
        if content:
            part_file(folder, output, extension).write_bytes(content)
    for path in folder.iterdir():
        fsync_path(path)


def _error_lines(parts: Sequence[Part]) -> Iterator[bytes]:
    """The records that were skipped when the parts were made, as far as they were kept."""
    for part in parts:
        path = dataset_file(part.prefix, "errors.jsonl")
        if path.is_file():
            with open(path, "rb") as file:
                yield from file


def _counts(parts: Sequence[Part]) -> dict[str, int | str]:
    return {
        "documents": sum(part.num_documents for part in parts),
        "sequences": sum(part.num_sequences for part in parts),
        "tokens": sum(part.num_tokens for part in parts),
        "dtype": parts[0].dtype.name,
    }


def _write_tokens(parts: Sequence[Part], path: Path, progress: ByteProgress) -> str:
    with Joiner(path, progress) as joiner:
        for part in parts:
            joiner.append(dataset_file(part.prefix, "bin"), part.num_tokens * part.dtype.itemsize, part.bin_digests)
        return joiner.finish()


def _write_index(parts: Sequence[Part], path: Path, progress: ByteProgress) -> str:
    digest, done = hashlib.sha256(), _bin_bytes(parts)
    with open(path, "wb") as out:
        for block in index_blocks(parts):
            out.write(block)
            digest.update(block)
            done += len(block)
            progress.update(done)
    return digest.hexdigest()
