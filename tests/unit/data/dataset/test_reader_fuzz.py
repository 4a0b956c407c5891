"""Thousands of damaged .bin, .idx, .json and .sha256 files: a DataError or a right result, whatever the damage."""

from __future__ import annotations

import pickle
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.data.dataset.inspection import describe, show_documents, verify_dataset
from ctxlm_ds.data.dataset.merge import merge_datasets
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.index.sentence_table import sentence_table
from ctxlm_ds.errors import DataError
from tests.fuzz import Case, damage, damage_json, run_cases
from tests.sample_data import ends_of, random_documents, starts_of, write_dataset
from tests.unit.data.dataset.test_reader import write_old

pytestmark = pytest.mark.long

JOINED_EVERY = 8
Content = dict[str, bytes]
"""The bytes of each file of a dataset by extension."""


def move_boundary(data: bytes, drawn: random.Random) -> bytes:
    """Move the boundary of a document by one sequence: the .idx still fits."""
    place = len(data) - 8 * drawn.randrange(2, 7)
    (first,) = struct.unpack_from("<q", data, place)
    return data[:place] + struct.pack("<q", first + drawn.choice((-1, 1))) + data[place + 8 :]


def mutate(content: Content, other: Content, drawn: random.Random) -> Content:
    """One file damaged, taken away, exchanged with one of another dataset, or two exchanged with each other."""
    changed = dict(content)
    extension = drawn.choice(list(content))
    kind = drawn.random()
    if kind < 0.03:
        del changed[extension]
    elif kind < 0.08:
        changed[extension] = other[extension]
    elif kind < 0.11:
        second = drawn.choice(list(content))
        changed[extension], changed[second] = content[second], content[extension]
    elif extension == "idx" and kind < 0.15:
        changed["idx"] = move_boundary(content["idx"], drawn)
    elif extension == "json" and kind < 0.5:
        changed["json"] = damage_json(content["json"], drawn)
    else:
        changed[extension] = damage(content[extension], drawn)
    return changed


def contents(dataset: IndexedDataset) -> tuple[list[list[int]], list[int]]:
    """Everything that a sample can be made of, read sequence by sequence."""
    sequences = [dataset.sequence(number).tolist() for number in range(len(dataset))]
    assert [len(sequence) for sequence in sequences] == dataset.lengths(0, len(dataset)).tolist()
    assert sum(map(len, sequences)) == dataset.num_tokens
    assert sum(1 for i in range(dataset.num_documents) for _ in dataset.document(i)) == len(dataset)
    return sequences, dataset.document_indices.tolist()


class DamagedDataset:
    """A dataset with some of its files, to be damaged in a folder, and another one."""

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

    def read(self, folder: Path, drawn: random.Random) -> str:
        """Damage the files and read what is left in every way; return the outcome."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        changed = mutate(self.content, self.other, drawn)
        for extension, data in changed.items():
            (folder / f"data.{extension}").write_bytes(data)
        try:
            dataset = IndexedDataset(folder / "data")
        except DataError:
            return "refused when opened"
        read = contents(dataset)
        read_sentence_table(dataset)
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


def read_sentence_table(dataset: IndexedDataset) -> None:
    if dataset.metadata is not None and not {"split_sentences", "append_eod"} <= dataset.metadata.keys():
        return
    try:
        table = sentence_table(dataset, 3)
    except DataError:
        return
    starts, ends = starts_of(table), ends_of(table)
    assert (starts >= 0).all() and (ends <= dataset.num_tokens).all() and (starts < ends).all()


def join(good: Path, damaged: Path, output: Path, expected: list[list[int]]) -> str:
    """A damaged part is refused, or the joined dataset holds what both held."""
    try:
        merge_datasets([str(good), str(damaged)], output)
    except DataError:
        assert not list(output.parent.glob(f"{output.name}*"))
        return "not joined"
    assert contents(IndexedDataset(output))[0] == expected
    for path in output.parent.glob(f"{output.name}*"):
        path.unlink()
    return "joined"


def prepare(folder: Path) -> Case:
    datasets = []
    for name, documents_seed in (("one", 1), ("two", 2)):
        documents = random_documents(6, sentences=4, tokens=8, seed=documents_seed)
        facts = {"vocab_size": 1000, "inputs": ["a.jsonl"], "tokenizer_path": "none", "bad_records": 2}
        write_dataset(folder / name, documents, eod_id=3, metadata=facts)
        write_old(folder / f"{name}-legacy", documents)
    for extensions in (("bin", "idx", "json", "sha256"), ("bin", "idx", "json"), ("bin", "idx")):
        bare = folder / f"bare-{len(extensions)}"
        for extension in extensions:
            shutil.copy(folder / f"one.{extension}", f"{bare}.{extension}")
        datasets.append(DamagedDataset(bare, folder / "two", extensions))
    datasets.append(DamagedDataset(folder / "one-legacy", folder / "two-legacy", ("bin", "idx")))
    good, _ = contents(IndexedDataset(folder / "two"))

    def case(seed: int) -> str:
        dataset, damaged = datasets[seed // 2 % len(datasets)], folder / "damaged"
        outcome = dataset.read(damaged, random.Random(seed))
        if seed % JOINED_EVERY:
            return outcome
        return join(folder / "two", damaged / "data", folder / "out", good + dataset.expected[0])

    return case


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "seeds", [range(1000), pytest.param(range(1000, 32_000), marks=pytest.mark.soak)], ids=["some", "many"]
)
def test_damaged_files(tmp_path: Path, seeds: range) -> None:
    outcomes = run_cases(prepare, tmp_path, seeds, room_bytes=256 << 20, limit_s=10)
    # Every stage has its share; else the mutations no longer reach it.
    for outcome in ("refused when opened", "refused by --verify", "right", "not joined", "joined"):
        assert outcomes[outcome] > len(seeds) // 1000
    assert outcomes["refused when its fingerprint was taken"]
