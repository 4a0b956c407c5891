"""Parts that are joined: how they are named, and which ones do not belong together."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.data.dataset.merge import merge_datasets
from ctxlm_ds.data.dataset.reader import IndexedDataset
from tests.sample_data import DatasetWriter, random_documents, write_dataset
from tests.unit.data.dataset.test_merge import PIECES, fails, write_parts


@pytest.fixture
def parts(tmp_path: Path) -> list[str]:
    return write_parts(tmp_path / "parts", vocab_size=1000)


def test_a_folder_means_every_dataset_in_it(parts: list[str], tmp_path: Path) -> None:
    merge_datasets(parts, tmp_path / "joined")
    folder = tmp_path / "parts"
    merge_datasets([str(folder)], folder / "whole")
    assert (folder / "whole.bin").read_bytes() == (tmp_path / "joined.bin").read_bytes()
    assert merge_datasets([str(folder)], folder / "whole").complete_already  # the output is none of the parts
    (folder / "alone.idx").write_bytes(b"")
    fails(r"alone\.bin: no such file, though", [str(folder)], tmp_path / "again")


def test_files_stand_for_their_datasets(parts: list[str], tmp_path: Path) -> None:
    assert merge_datasets([f"{prefix}.idx" for prefix in parts], tmp_path / "joined").num_parts == len(parts)
    everything = sorted(map(str, (tmp_path / "parts").iterdir()))  # what `parts/p*` becomes in a shell
    assert len(everything) == 4 * len(parts)
    merge_datasets(everything, tmp_path / "all")
    assert (tmp_path / "all.bin").read_bytes() == (tmp_path / "joined.bin").read_bytes()
    for double in ([parts[0], f"{parts[0]}.idx"], [f"{parts[0]}.idx"] * 2, [str(tmp_path / "parts"), parts[1]]):
        fails(r"p\d: named twice", double, tmp_path / "again")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer_fingerprint", "another"),
        ("split_sentences", False),
        ("sentence_splitter", 1),
        ("append_eod", True),
        ("vocab_size", 999),
    ],
)
def test_parts_made_otherwise_are_refused(parts: list[str], tmp_path: Path, key: str, value: object) -> None:
    other = write_dataset(tmp_path / "other", PIECES[0], metadata={"vocab_size": 1000} | {key: value})
    fails(rf"other: {key} is .*p0 has", [*parts, str(other)], tmp_path / "joined")


def test_datasets_of_other_kinds_are_not_mixed(parts: list[str], tmp_path: Path) -> None:
    other = write_dataset(tmp_path / "other", PIECES[0], metadata={"vocab_size": 1000})
    for extension in ("json", "sha256"):
        Path(f"{other}.{extension}").unlink()
    fails("other: has no JSON .* compare with that of .*p0", [*parts, str(other)], tmp_path / "joined")
    fails("p0: named twice", [parts[0], *parts], tmp_path / "joined")
    fails("p0: is one of the parts as well", parts, Path(parts[0]))
    (tmp_path / "empty").mkdir()
    fails("empty: no dataset .* in this folder", [str(tmp_path / "empty")], tmp_path / "joined")
    with DatasetWriter(tmp_path / "small", "uint16") as writer:
        writer.finalize(IndexedDataset(parts[0]).metadata or {})
    fails("token type is 'uint16', .*p0 has 'int32'", [*parts, str(tmp_path / "small")], tmp_path / "joined")


def test_a_set_of_shards_is_joined_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [f"c_text_sentence_shard{number:05d}-of-00004" for number in range(4)]
    shards = [str(write_dataset(tmp_path / name, random_documents(3, seed=i))) for i, name in enumerate(names)]
    fails(r"c_text_sentence: 3 of its 4 shards are named, missing 00001", [*shards[:1], *shards[2:]], tmp_path / "j")
    other = str(write_dataset(tmp_path / "other", random_documents(3, seed=9)))
    assert merge_datasets([other, *shards], tmp_path / "joined").num_parts == 5
    (tmp_path / "elsewhere").mkdir()
    others = [
        str(write_dataset(tmp_path / "elsewhere" / name, random_documents(4, seed=i))) for i, name in enumerate(names)
    ]
    assert merge_datasets([*shards, *others], tmp_path / "both").num_parts == 8
    assert not caplog.records
    fails("5 of its 4 shards are named, missing none, one is double", [*shards, others[0]], tmp_path / "j")
    (tmp_path / "c_text_sentence_shard00001-of-00004.partial").mkdir()
    unfinished = sorted(map(str, tmp_path.glob("c_text_sentence_shard00001*")))
    fails("partial: no dataset .* let ctxlm preprocess finish it", unfinished, tmp_path / "j")
    with caplog.at_level(logging.WARNING, logger="ctxlm_ds"):
        merge_datasets(shards[::-1], tmp_path / "backwards")
    assert "joined in the order given, which is not theirs" in caplog.text


def test_renamed_shards_are_known_by_their_json(tmp_path: Path) -> None:
    shared = {"inputs": ["c.jsonl"], "json_key": "text"}
    prefixes = [
        str(write_dataset(tmp_path / name, random_documents(3, seed=number), metadata=shared | {"shard": [number, 3]}))
        for number, name in enumerate(("first", "second", "third"))
    ]
    fails(r"c\.jsonl \(text\): 2 of its 3 shards are named, missing 00002", prefixes[:2], tmp_path / "joined")
    assert merge_datasets(prefixes, tmp_path / "joined").num_parts == 3


def _shard(prefix: Path, number: int, **metadata: Any) -> str:
    facts = {"source_signature": "a", "sources": ["a.jsonl"], "input_format": "auto", "shard": [number, 2]}
    name = f"{prefix.name}_shard{number:05d}-of-00002"
    return str(write_dataset(prefix.parent / name, random_documents(3, seed=number), metadata=facts | metadata))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"source_signature": "b", "sources": ["b.jsonl", "a.jsonl"]},
            r"with sources \['b.jsonl', 'a.jsonl'\], that with \['a.jsonl'\];",
        ),
        ({"source_signature": "b"}, "of files that had changed since"),
        ({"input_format": "text"}, "with input_format 'text', that with 'auto'"),
    ],
)
def test_shards_of_different_inputs_are_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    first, second = _shard(tmp_path / "c", 0), _shard(tmp_path / "c", 1, **change)
    message = f"shard00001-of-00002: shard 1 does not belong to shard 0, .*shard00000-of-00002: it was made {reason}"
    fails(message, [first, second], tmp_path / "joined")


def test_nothing_is_joined_twice(parts: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    merge_datasets(parts, folder / "whole")
    fails(r"whole: holds tokens that .*/p0 holds too", [str(folder)], tmp_path / "joined")
    fails(r"p4: holds tokens that .*/whole holds too", [str(folder / "whole"), parts[4]], tmp_path / "joined")
    for extension in ("bin", "idx", "json"):
        shutil.copy(f"{parts[4]}.{extension}", tmp_path / f"copy.{extension}")
    fails(r"copy: holds tokens that .*/p4 holds too", [*parts, str(tmp_path / "copy")], tmp_path / "joined")
    merge_datasets([parts[0], parts[2]], tmp_path / "some")
    merge_datasets([parts[4], parts[2]], tmp_path / "others")
    fails("others: holds tokens that .*some holds too: .* or both were joined from one", [
        str(tmp_path / "some"), str(tmp_path / "others")], tmp_path / "joined")  # fmt: skip
    twice = [str(write_dataset(tmp_path / f"c_shard0000{number}-of-00002", PIECES[0], metadata={
        "source_signature": "a", "shard": [number, 2]})) for number in range(2)]  # fmt: skip
    assert merge_datasets(twice, tmp_path / "repeating").num_parts == 2  # the input says everything twice
