"""Joined datasets beside one written in one go, interrupted joins, and parts that do not belong together."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.data.dataset.inspection import verify_dataset
from ctxlm_ds.data.dataset.merge import merge_datasets
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.errors import DataError
from ctxlm_ds.process.run_lock import RunLock
from tests.integration.forked import Forked
from tests.sample_data import DatasetWriter, random_documents, write_dataset

TOOL = Path(__file__).parents[4] / "tools" / "merge_datasets.py"
PIECES = [random_documents(30, seed=1), [], random_documents(1, seed=2), [[]], random_documents(40, seed=3)]


def write_parts(folder: Path, **metadata: Any) -> list[str]:
    folder.mkdir(exist_ok=True)
    return [str(write_dataset(folder / f"p{i}", piece, metadata=metadata)) for i, piece in enumerate(PIECES)]


def fails(message: str, prefixes: list[str], output: Path, overwrite: bool = False) -> None:
    before = sorted(path.name for path in output.parent.iterdir())
    with pytest.raises(DataError, match=message):
        merge_datasets(prefixes, output, overwrite)
    assert sorted(path.name for path in output.parent.iterdir()) == before


@pytest.fixture
def parts(tmp_path: Path) -> list[str]:
    return write_parts(tmp_path / "parts", vocab_size=1000)


def test_the_bytes_of_one_run_over_the_whole(parts: list[str], tmp_path: Path) -> None:
    result = merge_datasets(parts, tmp_path / "joined")
    whole = write_dataset(tmp_path / "whole", [document for piece in PIECES for document in piece])
    for extension in ("bin", "idx"):
        assert (tmp_path / f"joined.{extension}").read_bytes() == Path(f"{whole}.{extension}").read_bytes()
    joined, once = IndexedDataset(tmp_path / "joined"), IndexedDataset(whole)
    assert result.num_parts == len(PIECES)
    for dataset in (result.dataset, joined):
        assert (dataset.num_documents, len(dataset), dataset.num_tokens) == (
            once.num_documents, len(once), once.num_tokens
        )  # fmt: skip
    assert joined.metadata is not None and once.metadata is not None
    assert joined.metadata["sha256"] == once.metadata["sha256"]
    assert any("equal those in joined.sha256" in proof for proof in verify_dataset(joined))
    checked = subprocess.run(["sha256sum", "--strict", "-c", "joined.sha256"], cwd=tmp_path, capture_output=True)
    assert checked.returncode == 0
    assert sorted(path.name for path in tmp_path.glob("joined*")) == [
        "joined.bin", "joined.idx", "joined.json", "joined.sha256"
    ]  # fmt: skip


def test_order_is_the_one_given(parts: list[str], tmp_path: Path) -> None:
    merge_datasets(parts[::-1], tmp_path / "joined")
    expected = [document for piece in PIECES[::-1] for document in piece]
    joined = IndexedDataset(tmp_path / "joined")
    found = [[sequence.tolist() for sequence in joined.document(i)] for i in range(joined.num_documents)]
    assert found == expected


def test_counts_are_added_and_every_part_is_named(tmp_path: Path) -> None:
    pieces = [random_documents(5, seed=number) for number in range(3)]
    for number in range(2):
        counts = {"bad_records": 1 + number, "empty_documents": 2, "input_bytes": 10, "characters": 7}
        write_dataset(tmp_path / f"p{number}", pieces[number], metadata=counts | {
            "bad_record_reasons": {"not JSON": 1 + number} | ({"too long": 5} if number else {}),
            "inputs": ["a.jsonl", f"b{number}.jsonl"], "json_key": "text",
            "only_once": number, "unknown_tokens": 3, "words": 4,
        })  # fmt: skip
        (tmp_path / f"p{number}.errors.jsonl").write_text(f'{{"line": {number}}}\n' * 700)
    merge_datasets([str(tmp_path / "p0"), str(tmp_path / "p1")], tmp_path / "joined")
    metadata = json.loads((tmp_path / "joined.json").read_text())
    assert (metadata["bad_records"], metadata["empty_documents"]) == (3, 4)
    assert (metadata["input_bytes"], metadata["characters"]) == (20, 14)
    assert metadata["unknown_tokens"] == 6 and metadata["words"] == 8
    assert metadata["bad_record_reasons"] == {"not JSON": 3, "too long": 5}
    assert metadata["inputs"] == ["a.jsonl", "b0.jsonl", "b1.jsonl"]
    assert metadata["json_key"] == "text" and "only_once" not in metadata
    assert [part["name"] for part in metadata["parts"]] == ["p0", "p1"]
    assert metadata["parts"][1]["bad_record_reasons"] == {"not JSON": 2, "too long": 5}
    lines = (tmp_path / "joined.errors.jsonl").read_text().splitlines()
    assert lines == ['{"line": 0}'] * 700 + ['{"line": 1}'] * 300
    write_dataset(tmp_path / "p2", pieces[2])
    merge_datasets([str(tmp_path / "joined"), str(tmp_path / "p2")], tmp_path / "again")
    metadata = json.loads((tmp_path / "again.json").read_text())
    assert [part["name"] for part in metadata["parts"]] == ["p0", "p1", "p2"]
    assert "json_key" not in metadata


def test_small_sizes_are_told_in_small_units(parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1200))  # type: ignore[attr-defined]
    fails(r"1\.2 kB are free, the joined dataset takes \d+\.\d kB;", parts, tmp_path / "joined")


def test_a_damaged_part_is_found(parts: list[str], tmp_path: Path) -> None:
    path = Path(f"{parts[4]}.bin")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    fails(r"p4\.bin: sha256", parts, tmp_path / "joined")
    Path(f"{parts[2]}.bin").write_bytes(b"")
    fails(r"p2\.bin: 0 bytes", parts, tmp_path / "joined")


def test_a_finished_join_is_known_and_another_one_is_refused(parts: list[str], tmp_path: Path) -> None:
    assert not merge_datasets(parts, tmp_path / "joined").complete_already
    before = {path.name: (path.read_bytes(), path.stat().st_ino) for path in tmp_path.glob("joined*")}
    assert merge_datasets(parts, tmp_path / "joined").complete_already
    fails("exist.* already, and not as these parts", parts[::-1], tmp_path / "joined")
    assert {path.name: (path.read_bytes(), path.stat().st_ino) for path in tmp_path.glob("joined*")} == before
    merge_datasets(parts[::-1], tmp_path / "joined", overwrite=True)
    assert merge_datasets(parts[::-1], tmp_path / "joined").complete_already
    Path(f"{tmp_path}/joined.bin").write_bytes(b"")
    fails("exist.* already", parts[::-1], tmp_path / "joined")


def test_datasets_of_megatron_are_joined_without_a_json(parts: list[str], tmp_path: Path) -> None:
    merge_datasets(parts, tmp_path / "joined")
    for prefix in parts:
        for extension in ("json", "sha256"):
            Path(f"{prefix}.{extension}").unlink()
    merge_datasets(parts, tmp_path / "bare")
    assert sorted(path.name for path in tmp_path.glob("bare*")) == ["bare.bin", "bare.idx", "bare.sha256"]
    for extension in ("bin", "idx"):
        assert (tmp_path / f"bare.{extension}").read_bytes() == (tmp_path / f"joined.{extension}").read_bytes()
    assert merge_datasets(parts, tmp_path / "bare").complete_already
    fails("exist.* already", parts[::-1], tmp_path / "bare")


def _large_parts(folder: Path) -> list[str]:
    return [
        str(write_dataset(folder / f"p{number}", [[list(range(number, number + 40_000))] for _ in range(40)]))
        for number in range(6)
    ]


def _is_nothing_or_whole(folder: Path) -> bool:
    """Whether the output opens; then it must be whole. Leftovers may not open as a dataset."""
    for path in folder.rglob("*.idx"):
        verify_dataset(IndexedDataset(path.with_suffix("")))
    return (folder / "joined.idx").exists()


def _bytes_of_parts(folder: Path) -> int:
    size_bytes = 0
    for path in folder.rglob("*.part"):
        with suppress(FileNotFoundError):  # the command renames a finished part at any moment
            size_bytes += path.stat().st_size
    return size_bytes


def _started(folder: Path, *words: str) -> Forked:
    """The command, which writes to `printed` in a folder."""
    with (folder / "printed").open("wb") as printed:
        return Forked([str(TOOL), *words], os.environ, folder, printed.fileno(), printed.fileno(), 1)


@pytest.mark.long
def test_kill_9_leaves_nothing_that_is_accepted(tmp_path: Path) -> None:
    parts = _large_parts(tmp_path)
    output = tmp_path / "out" / "joined"
    words = ["--input", *parts, "--output-prefix", str(output)]
    rng = random.Random(5)
    for wait_bytes in [1, *(rng.randrange(1, 38_000_000) for _ in range(2))]:
        process = _started(tmp_path, *words)
        while process.poll() is None and _bytes_of_parts(output.parent) < wait_bytes:
            time.sleep(0.001)
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        finished = _is_nothing_or_whole(output.parent)
        if finished:
            for path in output.parent.glob("joined.*"):
                path.unlink()
    assert _started(tmp_path, *words, "--overwrite").wait(120) == 0, (tmp_path / "printed").read_text()
    assert _is_nothing_or_whole(output.parent)
    assert not list(output.parent.glob("*.partial*"))


@pytest.mark.long
def test_sigterm_and_a_full_disk_leave_nothing(tmp_path: Path) -> None:
    parts = _large_parts(tmp_path)
    output = tmp_path / "out" / "joined"
    words = ["--input", *parts, "--output-prefix", str(output)]
    command = ["prlimit", "--fsize=10000000", sys.executable, str(TOOL), *words]
    limited = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert limited.returncode == 2
    assert "File too large; nothing was kept" in limited.stderr and len(limited.stderr.splitlines()) == 1
    assert list(output.parent.iterdir()) == []
    process = _started(tmp_path, *words)
    while not any(path.stat().st_size for path in output.parent.rglob("*.part")):
        assert process.poll() is None
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 130
    assert (tmp_path / "printed").read_text() == "interrupted; nothing incomplete was kept\n"
    assert list(output.parent.iterdir()) == []


def _hold(folder: Path) -> None:
    RunLock(folder).acquire()
    (folder / "held").touch()
    time.sleep(60)


def test_what_a_killed_join_left_is_removed_and_a_living_one_is_not_disturbed(
    parts: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "joined.partial-merge"
    folder.mkdir()
    (folder / "joined.bin.part").write_bytes(b"x" * 1000)
    (folder / "joined.idx.part").write_bytes(b"x")
    holder = multiprocessing.get_context("fork").Process(target=_hold, args=(folder,), daemon=True)
    holder.start()
    while not (folder / "held").exists():
        time.sleep(0.01)
    with pytest.raises(DataError, match=r"partial-merge .*choose another --output-prefix"):
        merge_datasets(parts, tmp_path / "joined")
    holder.kill()
    holder.join()
    assert (folder / "joined.bin.part").exists()
    with caplog.at_level(logging.INFO, logger="ctxlm_ds"):
        merge_datasets(parts, tmp_path / "joined")
    assert "removed what an interrupted join left" in caplog.text
    assert not folder.exists()
    folder.mkdir()  # killed after the last rename
    assert merge_datasets(parts, tmp_path / "joined").complete_already
    assert not folder.exists()
    verify_dataset(IndexedDataset(tmp_path / "joined"))


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
