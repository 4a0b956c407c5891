"""Damage the files of small datasets in thousands of ways and see what opening, reading, verifying and joining do.

Run by test_reader_fuzz.py in a process of its own with little memory: python -m tests.indexed_mutations FOLDER SEED
COUNT. It prints how often each outcome came up, as JSON, and ends with a traceback at the first one that may not be.
"""

from __future__ import annotations

import json
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ctxlm_ds.data.dataset.inspection import describe, show_documents, verify_dataset
from ctxlm_ds.data.dataset.merge import merge_datasets
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.index.sentence_table import sentence_table
from ctxlm_ds.errors import DataError
from tests.sample_data import ends_of, random_documents, starts_of, write_dataset

MEMORY_BEYOND_IMPORTS_BYTES = 256 << 20
SECONDS_EACH = 10.0
EXTREMES = (0, 1, 9, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 2**31)
JSON_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1.5, 2**70, "", "x", [], {}, [[]], ["a"], {"bin": 3}, float("nan"),
)  # fmt: skip
Content = dict[str, bytes]
"""The bytes of each file of a dataset by extension."""


def _truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _number(data: bytes, rng: random.Random) -> bytes:
    """An extreme number somewhere, most often where headers have theirs."""
    changed = bytearray(data)
    width = rng.choice((1, 4, 8))
    place = rng.choice((rng.randrange(len(data)), rng.choice((8, 9, 16, 17, 18, 24, 26, 32, 34, 40, 48, 56))))
    place = max(0, min(place, len(data) - width))
    changed[place : place + width] = struct.pack("<Q", rng.choice(EXTREMES))[:width][: len(data) - place]
    return bytes(changed)


def _append(data: bytes, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.choice((1, 2, 4, 8, 12, 1000)))


def _insert(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + rng.choice((b"\x00" * 8, b"\xff" * 4, b"{", data[:64])) + data[place:]


def _remove(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + data[place + rng.choice((1, 4, 8, 100)) :]


def _noise(data: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((1, 9, 34, len(data))))


def _empty(data: bytes, rng: random.Random) -> bytes:
    return b""


def _boundary(data: bytes, rng: random.Random) -> bytes:
    """Move the boundary of a document by one sequence: the .idx still fits."""
    place = len(data) - 8 * rng.randrange(2, 7)
    (first,) = struct.unpack_from("<q", data, place)
    return data[:place] + struct.pack("<q", first + rng.choice((-1, 1))) + data[place + 8 :]


def _json_value(data: bytes, rng: random.Random) -> bytes:
    """Another value for one of the fields."""
    try:
        content = json.loads(data)
    except ValueError:
        return b"[" * 50_000
    content[rng.choice(list(content))] = rng.choice(JSON_VALUES)
    return json.dumps(content).encode()


CHANGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _truncate, _flip, _flip, _flip, _number, _number, _append, _insert, _remove, _noise, _empty,
)  # fmt: skip


def mutate(content: Content, other: Content, rng: random.Random) -> Content:
    """One file damaged, taken away, exchanged with one of another dataset, or two exchanged with each other."""
    changed = dict(content)
    extension = rng.choice(list(content))
    kind = rng.random()
    if kind < 0.03:
        del changed[extension]
    elif kind < 0.08:
        changed[extension] = other[extension]
    elif kind < 0.11:
        second = rng.choice(list(content))
        changed[extension], changed[second] = content[second], content[extension]
    elif extension == "idx" and kind < 0.15:
        changed["idx"] = _boundary(content["idx"], rng)
    elif extension == "json" and kind < 0.5:
        changed["json"] = _json_value(content["json"], rng)
    else:
        changed[extension] = rng.choice(CHANGES)(content[extension], rng)
    return changed


def contents(dataset: IndexedDataset) -> tuple[list[list[int]], list[int]]:
    """Everything that a sample can be made of, read sequence by sequence."""
    sequences = [dataset.sequence(number).tolist() for number in range(len(dataset))]
    assert [len(sequence) for sequence in sequences] == dataset.lengths(0, len(dataset)).tolist()
    assert sum(map(len, sequences)) == dataset.num_tokens
    assert sum(1 for i in range(dataset.num_documents) for _ in dataset.document(i)) == len(dataset)
    return sequences, dataset.document_indices.tolist()


class Case:
    """One kind of dataset, whole in a folder, and what it holds."""

    def __init__(self, prefix: Path, other: Path, extensions: tuple[str, ...]) -> None:
        self.extensions = extensions
        self.content = {extension: Path(f"{prefix}.{extension}").read_bytes() for extension in extensions}
        self.other = {extension: Path(f"{other}.{extension}").read_bytes() for extension in extensions}
        self.expected = contents(IndexedDataset(prefix))
        self.deciding = self._deciding(IndexedDataset(prefix))

    @staticmethod
    def _deciding(dataset: IndexedDataset) -> list[Any]:
        metadata = dataset.metadata or {}
        return [metadata.get(key) for key in ("tokenizer_fingerprint", "split_sentences", "append_eod", "eod_id")]

    def try_one(self, folder: Path, rng: random.Random) -> str:
        """The outcome of one mutation."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        changed = mutate(self.content, self.other, rng)
        for extension, data in changed.items():
            (folder / f"data.{extension}").write_bytes(data)
        try:
            dataset = IndexedDataset(folder / "data")
        except DataError:
            return "refused when opened"
        read = contents(dataset)
        sentence_table_or_error(dataset)
        assert contents(pickle.loads(pickle.dumps(dataset))) == read
        try:
            list(describe(dataset))
            list(show_documents(dataset, None, 3))
        except DataError:
            return "refused when its fingerprint was taken"
        same = read == self.expected and self._deciding(dataset) == self.deciding
        if self._is_recorded(changed):  # a run takes the fingerprint before anything else
            assert list(map(len, read[0])) == list(map(len, self.expected[0])) and read[1] == self.expected[1]
        try:
            verify_dataset(dataset)
        except DataError:
            return "refused by --verify"
        assert same or not self._is_recorded(changed), "damage that --verify did not see"
        return "right" if same else "another dataset, with nothing recorded to tell"

    def _is_recorded(self, changed: Content) -> bool:
        """Whether the checksums that prove the damaged file stand in another one."""
        if "sha256" in self.extensions:
            return True
        return "json" in self.extensions and changed.get("json") == self.content["json"]


def sentence_table_or_error(dataset: IndexedDataset) -> None:
    if dataset.metadata is not None and not {"split_sentences", "append_eod"} <= dataset.metadata.keys():
        return
    try:
        table = sentence_table(dataset, 3)
    except DataError:
        return
    assert (
        (starts_of(table) >= 0).all()
        and (ends_of(table) <= dataset.num_tokens).all()
        and (starts_of(table) < ends_of(table)).all()
    )


def try_joining(good: Path, damaged: Path, output: Path, expected: list[list[int]]) -> str:
    """A damaged part is refused, or the joined dataset holds what both held."""
    try:
        merge_datasets([str(good), str(damaged)], output)
    except DataError:
        assert not list(output.parent.glob(f"{output.name}*"))
        return "not joined"
    joined, _ = contents(IndexedDataset(output))
    assert joined == expected
    for path in output.parent.glob(f"{output.name}*"):
        path.unlink()
    return "joined"


def main() -> None:
    folder, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    cases: list[Case] = []
    for name, documents_seed in (("one", 1), ("two", 2)):
        documents = random_documents(6, sentences=4, tokens=8, seed=documents_seed)
        facts = {"vocab_size": 1000, "inputs": ["a.jsonl"], "tokenizer_path": "none", "bad_records": 2}
        write_dataset(folder / name, documents, eod_id=3, metadata=facts)
        write_legacy(folder / f"{name}-legacy", documents)
    for extensions in (("bin", "idx", "json", "sha256"), ("bin", "idx", "json"), ("bin", "idx")):
        bare = folder / f"bare-{len(extensions)}"
        for extension in extensions:
            shutil.copy(folder / f"one.{extension}", f"{bare}.{extension}")
        cases.append(Case(bare, folder / "two", extensions))
    cases.append(Case(folder / "one-legacy", folder / "two-legacy", ("bin", "idx")))
    joined, _ = contents(IndexedDataset(folder / "two"))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BEYOND_IMPORTS_BYTES,) * 2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a hang ends the process by the signal
    outcomes: Counter[str] = Counter()
    for number in range(count):
        signal.setitimer(signal.ITIMER_REAL, SECONDS_EACH)
        case = cases[number % len(cases)]
        outcomes[case.try_one(folder / "changed", rng)] += 1
        if number % 8 == 0:
            damaged = folder / "changed" / "data"
            expected = joined + case.expected[0]
            outcomes[try_joining(folder / "two", damaged, folder / "out", expected)] += 1
    json.dump(outcomes, sys.stdout)


def write_legacy(prefix: Path, documents: list[list[list[int]]]) -> None:
    """A TNTIDX dataset (test_index_file.py has the layout)."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    starts = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    bounds = [0]
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    numbers = [1, 4, 4, len(lengths), len(lengths), len(bounds), *range(len(lengths) + 1), *starts, *lengths, *bounds]
    Path(f"{prefix}.idx").write_bytes(b"TNTIDX\x00\x00" + struct.pack(f"<{len(numbers)}q", *numbers))
    flat = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(flat)}i", *flat))


if __name__ == "__main__":
    main()
