"""Join datasets into one without decoding them.

The result is what one preprocessing of all the text would have written; its JSON lists the parts as well. The files are
copied in blocks while all checksums are checked, and memory does not grow with the tokens. They are written in
PREFIX.partial-merge/, which is locked: the next join of that name removes what a killed one left.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ctxlm_ds.atomic import PARTIAL_MARK, is_full_disk, stop_signals_interrupt
from ctxlm_ds.console import byte_progress, format_size, logger
from ctxlm_ds.data.dataset.metadata import METADATA_VERSION, file_digest
from ctxlm_ds.data.dataset.reader import IndexedDataset, OpeningProof, dataset_file
from ctxlm_ds.data.dataset.writer import EXTENSIONS, IndexedDatasetWriter, LockedFolder, publish_parts, refuse_existing
from ctxlm_ds.errors import DataError

_MAX_ERROR_LINES, _MOST_SHOWN = 1000, 10
_SUMMED = ("empty_documents", "bad_records", "input_bytes", "characters", "unknown_tokens", "words")
_OF_A_PART = (
    "documents", "sequences", "tokens", "empty_documents", "bad_records", "source_signature", "shard", "sha256"
)  # fmt: skip
_REPLACED = ("format", "version", "documents", "sequences", "tokens", "dtype", "sha256", "build_key", "parts")
_NOT_THESE = ", and not as these parts joined"
_SHARD = re.compile(r"_shard(\d+)-of-(\d+)")
_SAME = (
    "tokenizer_fingerprint", "vocab_size", "sentence_prefix", "eod_id", "split_sentences", "sentence_splitter",
    "keep_newlines", "append_eod", "prepend_bos", "split_special_tokens", "spans_key",
)  # fmt: skip
"""Settings that decide what the tokens mean; all parts of one dataset have the same."""
_OF_A_SHARD_SET = ("sources", "source_signature", "input_format", "json_keys", "json_key", "build_version")
"""Settings that shards of one set have in common in addition: what was read, and how."""
_WEIGHT = "(to see a source more often give it a weight in data.train)"


@dataclass(frozen=True, slots=True)
class MergeResult:
    """A joined dataset."""

    dataset: IndexedDataset
    num_parts: int
    seconds: float
    complete_already: bool
    """True if it existed, joined from the same parts, and was left as it is."""


def merge_datasets(inputs: Sequence[str], output_prefix: str | Path, overwrite: bool = False) -> MergeResult:
    """Join datasets (prefixes, or folders of them) in the order given.

    Raises DataError if the parts do not belong together, one is missing or damaged, the output exists and was made of
    something else, another process writes it, or the disk is full; what was written is removed first.
    """
    start_s = time.monotonic()
    output = str(output_prefix)
    parts = open_parts(find_parts(inputs, output))
    complete = not overwrite and _is_complete(output, parts)
    folder = LockedFolder(f"{output}{PARTIAL_MARK}merge")
    if not complete:
        refuse_existing(output, overwrite, _NOT_THESE)
        _write(output, parts, folder, overwrite)
    elif folder.path.exists():
        with suppress(DataError), folder:  # killed after the last file got its name; leaving removes the folder
            pass
    return MergeResult(IndexedDataset(output), len(parts), time.monotonic() - start_s, complete)


def _is_complete(output: str, parts: Sequence[MergeInput]) -> bool:
    """Return whether the output exists and was joined from these parts (its tokens are not read again)."""
    try:
        present = IndexedDataset(output)
        _ = present.index_digest  # compared with the recorded one
    except DataError:
        return False
    if parts[0].metadata:
        return present.metadata is not None and present.metadata.get("build_key") == _build_key(parts)
    # Megatron's parts have no JSON to compare; the index has the length of every sequence of every part.
    document = sequence = 0
    for part in parts:
        arrays = part.open().arrays
        last = document + arrays.num_documents
        lengths = present.arrays.lengths[sequence : sequence + arrays.num_sequences]
        documents = present.arrays.documents[document : last + 1]
        if not (np.array_equal(lengths, arrays.lengths) and np.array_equal(documents - sequence, arrays.documents)):
            return False
        document, sequence = last, sequence + arrays.num_sequences
    return present.metadata is None and (document, sequence) == (present.num_documents, present.num_sequences)


def _write(output: str, parts: Sequence[MergeInput], folder: LockedFolder, overwrite: bool) -> None:
    parent = Path(output).parent
    try:
        with folder, stop_signals_interrupt():
            if folder.clear():
                logger.info("%s: removed what an interrupted join left", folder.path)
            needed = sum(part.num_bytes for part in parts)
            if (free := shutil.disk_usage(parent).free) < needed:
                raise DataError(
                    f"{parent}: {format_size(free)} are free, the joined dataset takes {format_size(needed)};"
                    " free some space or choose another --output-prefix"
                )
            with (
                byte_progress("merge", needed) as progress,
                IndexedDatasetWriter(
                    output, parts[0].dtype, overwrite, folder.path, with_spans=parts[0].has_spans
                ) as writer,
            ):
                for part in parts:
                    dataset = part.open()
                    digest = writer.add_dataset(dataset, progress.update)
                    if part.has_spans:
                        dataset.check_recorded("spans", file_digest(dataset_file(part.prefix, "spans")))
                    dataset.check_recorded("bin", digest)
                writer.prepare(_merged_metadata(parts), "".join(islice(_error_lines(parts), _MAX_ERROR_LINES)))
                progress.update(needed)
            folder.check()
            refuse_existing(output, overwrite, _NOT_THESE)  # another program may have written it meanwhile
            publish_parts(output, folder.path)
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise DataError(
            f"{parent}: {error.strerror}; nothing was kept, free some space or choose another --output-prefix"
        ) from error


def _error_lines(parts: Sequence[MergeInput]) -> Iterator[str]:
    """Yield the records that were skipped when the parts were made, as far as they were kept."""
    for part in parts:
        path = dataset_file(part.prefix, "errors.jsonl")
        if path.is_file():
            with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
                yield from file


def _build_key(parts: Sequence[MergeInput]) -> str:
    """Return a sha256 (hex) of what decides a joined dataset: the checksums of its parts, in order."""
    decided = []
    for part in parts:
        spans = part.metadata["sha256"]["spans"] if part.has_spans else None
        decided.append([part.idx_digest, *filter(None, (part.bin_digest, spans))])
    return hashlib.sha256(json.dumps(["joined", METADATA_VERSION, decided]).encode()).hexdigest()


def _merged_metadata(parts: Sequence[MergeInput]) -> dict[str, Any] | None:
    """Return settings that all parts share, sums of their counts, and the parts; None for datasets of Megatron."""
    if not parts[0].metadata:
        return None
    shared: dict[str, Any] = {}
    for key in parts[0].metadata:
        values = [part.metadata.get(key) for part in parts]
        is_uncounted = key in ("unknown_tokens", "words") and None in values  # a part from before they were counted
        if key in _REPLACED or is_uncounted:
            continue
        if key in _SUMMED:
            shared[key] = sum(value or 0 for value in values)
        elif key in ("inputs", "sources"):
            entries = {json.dumps(entry, sort_keys=True): entry for value in values for entry in value or []}
            shared[key] = list(entries.values())
        elif all(map(_is_counts, values)):
            total: Counter[str] = Counter()
            for value in values:
                total.update(value)
            shared[key] = dict(total)
        elif all(value == values[0] for value in values):
            shared[key] = values[0]
    records = [record for part in parts for record in _records(part)]
    return {**shared, "build_key": _build_key(parts), "parts": records}


def _is_counts(value: object) -> bool:
    """Return True for an object of numbers, such as bad records by reason."""
    return isinstance(value, dict) and all(type(count) is int for count in value.values())


def _records(part: MergeInput) -> Iterator[dict[str, Any]]:
    """Yield the record of a part in the joined JSON; the records of its parts if it was joined itself."""
    if part.metadata.get("parts"):
        yield from part.metadata["parts"]
        return
    kept = {key: part.metadata[key] for key in _OF_A_PART if key in part.metadata}
    reasons = {key: value for key, value in part.metadata.items() if _is_counts(value)}
    yield {"name": Path(part.prefix).name, **kept, **reasons}


@dataclass(frozen=True, slots=True)
class MergeInput:
    """One dataset to be joined, as it was found."""

    prefix: str
    proof: OpeningProof
    dtype: np.dtype[Any]
    num_bytes: int
    """Size that .bin and .idx take while they are written."""
    bin_digest: str | None
    """Recorded sha256 (hex) of .bin, if any."""
    idx_digest: str

    @classmethod
    def of(cls, prefix: str) -> MergeInput:
        """Open a dataset and keep what was found. Raises DataError if it is damaged."""
        found = IndexedDataset(prefix)
        digest = next((recorded["bin"] for _, recorded in found.recorded_digests() if "bin" in recorded), None)
        num_bytes = found.tokens.nbytes + 16 * (found.num_sequences + found.num_documents)
        num_bytes += found.num_tokens * found.has_spans
        return cls(found.prefix, found.proof, found.dtype, num_bytes, digest, found.index_digest)

    @property
    def metadata(self) -> dict[str, Any]:
        """Empty for a dataset of Megatron."""
        return self.proof.metadata or {}

    @property
    def has_spans(self) -> bool:
        return "spans" in (self.metadata.get("sha256") or {})

    def open(self) -> IndexedDataset:
        """Open the dataset again. Raises DataError if it is no longer what was found."""
        dataset = IndexedDataset(self.prefix, self.proof)
        if dataset.proof != self.proof:
            raise DataError(f"{self.prefix}: was changed while it was being joined; start again")
        return dataset


def find_parts(inputs: Sequence[str], output_prefix: str | Path) -> list[str]:
    """Return the prefixes that the inputs name, in their order.

    An input is a prefix, or files of a dataset (as `wiki_shard*` names them), or a folder: every dataset in it except
    the output, sorted by name (Megatron's form). Raises DataError for a folder without datasets or with a .bin or .idx
    alone, and for a dataset that is named twice.
    """
    output = Path(output_prefix).resolve()
    found: dict[Path, tuple[str, set[str]]] = {}
    for given in inputs:
        if Path(given).is_dir():
            pairs = [(prefix, "") for prefix in _folder_prefixes(Path(given)) if Path(prefix).resolve() != output]
        else:
            pairs = [_without_extension(given)]
        for prefix, extension in pairs:
            extensions = found.setdefault(Path(prefix).resolve(), (prefix, set()))[1]
            if extensions and (not extension or extensions & {"", extension}):
                raise DataError(f"{prefix}: named twice; each part is joined once {_WEIGHT}")
            extensions.add(extension)
    if output in found:
        raise DataError(f"{output_prefix}: is one of the parts as well; choose another --output-prefix")
    return [prefix for prefix, _ in found.values()]


def _without_extension(given: str) -> tuple[str, str]:
    """Split the name of a dataset's file into prefix and extension; any other name is a prefix."""
    for extension in EXTENSIONS:
        prefix = given.removesuffix(f".{extension}")
        if prefix != given and Path(given).is_file() and dataset_file(prefix, "idx").is_file():
            return prefix, extension
    return given, ""


def _folder_prefixes(folder: Path) -> list[str]:
    bins, indexes = ({path.stem for path in folder.glob(f"*.{extension}")} for extension in ("bin", "idx"))
    for name in sorted(bins ^ indexes):
        missing = f"{folder / name}.{'idx' if name in bins else 'bin'}: no such file, though its other half is there"
        raise DataError(f"{missing} (not finished?); remove that, or name the datasets one by one")
    if not indexes:
        unfinished = ", or let ctxlm preprocess finish it" if PARTIAL_MARK.rstrip("-") in folder.name else ""
        raise DataError(f"{folder}: no dataset (.bin and .idx) in this folder; check --input{unfinished}")
    return [str(folder / name) for name in sorted(indexes)]


def open_parts(prefixes: Sequence[str]) -> list[MergeInput]:
    """Open every part. Raises DataError if one is damaged or if they do not belong together."""
    parts: list[MergeInput] = []
    for prefix in prefixes:
        parts.append(MergeInput.of(prefix))
        _check_fits(parts[0], parts[-1])
    _check_shards(parts)
    _check_doubles(parts)
    return parts


def _check_fits(first: MergeInput, other: MergeInput) -> None:
    if bool(first.metadata) != bool(other.metadata):
        without, with_json = (other, first) if first.metadata else (first, other)
        raise DataError(
            f"{without.prefix}: has no JSON (a dataset of Megatron) to compare with that of {with_json.prefix}; "
            "whether their tokenizers are the same is not known: name both in data.train instead"
        )
    for key in ("token type", *_SAME):
        mine, theirs = (part.dtype.name if key == "token type" else part.metadata.get(key) for part in (first, other))
        if mine != theirs:
            raise DataError(
                f"{other.prefix}: {key} is {theirs!r:.60}, {first.prefix} has {mine!r:.60}; only datasets made "
                "with the same tokenizer and settings are joined, preprocess one of them again"
            )


def _check_shards(parts: Sequence[MergeInput]) -> None:
    """Require all shards of a dataset made with --shard, of one input: the joined one must neither lack nor repeat."""
    sets: dict[tuple[str, int], list[tuple[int, MergeInput]]] = {}
    for part in parts:
        name, number, count = _shard_of(part)
        if count > 1:
            sets.setdefault((name, count), []).append((number, part))
    for (name, count), members in sets.items():
        numbers = [number for number, _ in members]
        # Twice as many may be the shards of two corpora of one name, from two folders.
        times = len(numbers) // count
        if times == 0 or Counter(numbers) != Counter(dict.fromkeys(range(count), times)):
            absent = (f"{number:05d}" for number in range(count) if number not in numbers)
            missing = list(islice(absent, _MOST_SHOWN + 1))  # a damaged JSON may name any count
            shown = ", ".join(missing[:_MOST_SHOWN]) + (" …" if len(missing) > _MOST_SHOWN else "")
            raise DataError(
                f"{name}: {len(numbers)} of its {count} shards are named, missing {shown or 'none, one is double'}; "
                "make them with ctxlm preprocess --shard, or name all"
            )
        _check_one_input(members, count)
        if numbers != list(range(count)) * times:
            logger.warning("%s: shards are joined in the order given, which is not theirs", name)


def _shard_of(part: MergeInput) -> tuple[str, int, int]:
    """Return the set that a part is a shard of, its number and their count: by its name, else by its JSON."""
    name = Path(part.prefix).name
    if match := _SHARD.search(name):
        return _SHARD.sub("", name), int(match[1]), int(match[2])
    number, count = part.metadata.get("shard") or (0, 1)
    return f"{', '.join(part.metadata.get('inputs') or [])} ({part.metadata.get('json_key')})", number, count


def _check_one_input(members: Sequence[tuple[int, MergeInput]], count: int) -> None:
    """Require every number of each input that the shards were made of."""
    made_of: dict[str, list[tuple[int, MergeInput]]] = {}
    for number, part in members:
        made_of.setdefault(json.dumps([part.metadata.get(key) for key in _OF_A_SHARD_SET]), []).append((number, part))
    if all(len({number for number, _ in group}) == count for group in made_of.values()):
        return
    (number, first), (other_number, other) = (group[0] for group in list(made_of.values())[:2])
    key = next(key for key in _OF_A_SHARD_SET if first.metadata.get(key) != other.metadata.get(key))
    reason = f"with {key} {other.metadata.get(key)!r:.60}, that with {first.metadata.get(key)!r:.60}"
    if key == "source_signature":
        reason = "of files that had changed since"
    raise DataError(
        f"{other.prefix}: shard {other_number} does not belong to shard {number}, {first.prefix}: it was made {reason}"
        "; make all shards again (--overwrite) with the same ctxlm preprocess --input, in the same order"
    )


def _check_doubles(parts: Sequence[MergeInput]) -> None:
    """Refuse to join tokens twice: a dataset and its copy, or parts and what was joined from them."""
    seen: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}
    for part in parts:
        for digests, record in _contents(part):
            prefix, other = seen.setdefault(digests, (part.prefix, record))
            if prefix != part.prefix and not _are_different_shards(other, record):
                raise DataError(
                    f"{part.prefix}: holds tokens that {prefix} holds too: one is a copy of the other or was joined "
                    f"from it, or both were joined from one dataset; name only one of them {_WEIGHT}"
                )


def _contents(part: MergeInput) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """Yield the sha256 of .bin and .idx of the part, and of those that it was joined from; none without tokens."""
    if part.bin_digest and part.proof.num_tokens:
        yield (part.bin_digest, part.idx_digest), part.metadata
    for record in part.metadata.get("parts") or []:
        sha256 = record.get("sha256")
        if record.get("tokens") and isinstance(sha256, dict) and {"bin", "idx"} <= sha256.keys():
            yield (str(sha256["bin"]), str(sha256["idx"])), record


def _are_different_shards(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True for two shards of one input, which never overlap: the input itself holds this text twice."""
    shards: list[Any] = [record.get("shard") for record in (one, other)]
    return (
        one.get("source_signature") is not None
        and one["source_signature"] == other.get("source_signature")
        and all(isinstance(shard, list) for shard in shards)
        and shards[0][1:] == shards[1][1:]  # of as many
        and shards[0] != shards[1]
    )
