"""Shards, interrupted runs and finished datasets: the bytes are those of one uninterrupted run, or nothing is there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.data.dataset import writer as writer_module
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.preprocess import folder as folder_module
from ctxlm_ds.data.preprocess import job as preprocess_module
from ctxlm_ds.data.preprocess.job import PreprocessConfig, PreprocessResult, preprocess
from ctxlm_ds.data.sources.bad_records import MAX_KEPT
from ctxlm_ds.data.sources.types import InputShard
from ctxlm_ds.errors import DataError, RunLockedError
from ctxlm_ds.process.run_lock import RunLock
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents, write_corpus


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    train_tokenizer("bpe", make_documents(60, seed=7), 500, folder)
    return folder


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three files of a dozen chunks, one of them compressed; progress is saved after every chunk."""
    monkeypatch.setattr("ctxlm_ds.data.sources.reading.CHUNK_BYTES", 4000)
    monkeypatch.setattr(preprocess_module, "SAVE_INTERVAL_BYTES", 1)
    names = ["a.jsonl", "b.jsonl.gz", "c.jsonl"]
    for seed, name in enumerate(names):
        write_corpus(tmp_path / name, 25, seed=seed, format=name.split(".", 1)[1])
    with open(tmp_path / "c.jsonl", "a") as file:
        file.write('{"other": "key"}\n{broken\n')
    return [tmp_path / name for name in names]


def _run(corpus: list[Path], tokenizer: Path, prefix: Path, **settings: Any) -> PreprocessResult:
    config = PreprocessConfig(**{"max_bad_records": 5, "split_sentences": True, **settings})
    return preprocess([str(path) for path in corpus], tokenizer, prefix, config)[0]


def _contents(prefix: str | Path) -> dict[str, bytes]:
    path = Path(prefix)
    files = [file for file in path.parent.glob(f"{path.name}*") if file.is_file()]
    return {file.name.removeprefix(path.name): file.read_bytes() for file in files}


class _Killed(BaseException):
    """Stands for SIGKILL: nothing of the program may run behind it."""


def _kill_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the run at its step-th write, save or rename, without any tidying."""
    done = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal done
            done += 1
            if done > step:
                raise _Killed
            return function(*arguments, **named)

        return call

    monkeypatch.setattr(writer_module.IndexedDatasetWriter, "add_documents",
                        counted(writer_module.IndexedDatasetWriter.add_documents))  # fmt: skip
    monkeypatch.setattr(writer_module.IndexedDatasetWriter, "save", counted(writer_module.IndexedDatasetWriter.save))
    monkeypatch.setattr(folder_module, "write_text", counted(folder_module.write_text))
    monkeypatch.setattr(writer_module, "publish", counted(writer_module.publish))
    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **named: None)


@pytest.mark.parametrize("step", [0, 3, 20, *range(-8, 0)])
def test_a_killed_run_is_gone_on_with_to_the_same_bytes(
    corpus: list[Path], tokenizer: Path, tmp_path: Path, step: int
) -> None:
    whole = _run(corpus, tokenizer, tmp_path / "whole" / "data", workers=1)
    prefix = tmp_path / "parts" / "data_text_sentence"
    with pytest.MonkeyPatch.context() as patch:
        if step < 0:  # the last ones: preparing and renaming
            steps: list[int] = []
            patch.setattr(folder_module, "write_text", lambda *_: steps.append(1))
            _run(corpus, tokenizer, tmp_path / "count" / "data")
            step += 3 * len(steps) + 5
    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Killed):
        _kill_at(step, patch)
        _run(corpus, tokenizer, tmp_path / "parts" / "data")
    with pytest.raises(DataError, match="no such file"):
        IndexedDataset(prefix)
    assert not Path(f"{prefix}.idx").exists()
    result = _run(corpus, tokenizer, tmp_path / "parts" / "data", workers=1)
    assert not result.was_complete
    assert _contents(prefix) == _contents(whole.prefix)
    assert result.metadata["bad_record_reasons"] == whole.metadata["bad_record_reasons"]


def test_a_piece_is_not_read_twice(
    corpus: list[Path], tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Killed):
        _kill_at(30, patch)
        _run(corpus, tokenizer, tmp_path / "data")
    progress = json.loads((tmp_path / "data_text_sentence.partial" / "progress.json").read_text())
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        add = writer_module.IndexedDatasetWriter.add_documents
        patch.setattr(
            writer_module.IndexedDatasetWriter,
            "add_documents",
            lambda self, tokens, lengths, sizes: (seen.append(len(sizes)), add(self, tokens, lengths, sizes)),
        )
        result = _run(corpus, tokenizer, tmp_path / "data")
    assert progress["writers"][0]["documents"] > 0
    assert sum(seen) == result.metadata["documents"] - progress["writers"][0]["documents"]


@pytest.mark.parametrize(
    "change",
    [
        "settings",
        "splitter",
        "source",
        "tokenizer",
        "progress",
        "count",
        "cut",
        "bit of bin",
        "bit of lengths",
        "bit of documents",
    ],  # fmt: skip
)
def test_progress_of_something_else_is_not_gone_on_with(
    corpus: list[Path],
    tokenizer: Path,
    tmp_path: Path,
    change: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefix, folder = tmp_path / "data", tmp_path / "data_text_sentence.partial"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Killed):
        _kill_at(30, patch)
        _run(corpus, tokenizer, prefix)
    settings = {}
    if change == "settings":
        settings["append_eod"] = True
    elif change == "splitter":
        monkeypatch.setattr("ctxlm_ds.data.preprocess.config.SPLITTER_VERSION", 1)
    elif change == "source":
        with open(corpus[0], "a") as file:
            file.write('{"text": "One more."}\n')
    elif change == "tokenizer":
        train_tokenizer("bpe", make_documents(60, seed=7), 600, tmp_path / "other")
        tokenizer = tmp_path / "other"
    elif change == "progress":
        (folder / "progress.json").write_text('{"position": 7}')
    elif change == "count":
        text = (folder / "progress.json").read_text()
        (folder / "progress.json").write_text(text.replace('"records": ', '"records": 1'))
    elif change == "cut":
        os.truncate(folder / "data_text_sentence.bin.part", 10)
    else:
        path = folder / f"data_text_sentence.{change.split()[-1]}.part"
        content = bytearray(path.read_bytes())
        content[4] ^= 1
        path.write_bytes(content)
    caplog.clear()
    result = _run(corpus, tokenizer, prefix, **settings)
    assert "starting again" in caplog.text
    assert _contents(result.prefix) == _contents(_run(corpus, tokenizer, tmp_path / "b" / "data", **settings).prefix)


@pytest.mark.parametrize("other_build", [False, True])
def test_overwrite_goes_on_with_progress_of_its_own_build(
    corpus: list[Path], tokenizer: Path, tmp_path: Path, other_build: bool, caplog: pytest.LogCaptureFixture
) -> None:
    whole = _run(corpus, tokenizer, tmp_path / "whole" / "data")
    older = _run(corpus[:2], tokenizer, tmp_path / "data")
    before = _contents(older.prefix)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Killed):
        _kill_at(30, patch)
        _run(corpus, tokenizer, tmp_path / "data", overwrite=True, append_eod=other_build)
    assert _contents(older.prefix) == before
    caplog.clear()
    with caplog.at_level("INFO", logger="ctxlm_ds"):
        again = _run(corpus, tokenizer, tmp_path / "data", overwrite=True)
    assert ("resuming after" in caplog.text) != other_build
    assert ("another input, tokenizer or setting; starting again" in caplog.text) == other_build
    assert _contents(again.prefix) == _contents(whole.prefix)


def test_a_dataset_that_appears_meanwhile_is_not_replaced(
    corpus: list[Path], tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in corpus:
        path.unlink()
    lines = [json.dumps({"title": f"Title {number}.", "text": "Some text."}) for number in range(20)]
    corpus[0].write_text("\n".join(lines))
    check = folder_module.PartialFolder.check
    others: list[PreprocessResult] = []

    def meanwhile(self: folder_module.PartialFolder) -> None:
        monkeypatch.setattr(folder_module.PartialFolder, "check", check)
        others.append(_run(corpus[:1], tokenizer, tmp_path / "data", json_keys=("title",)))
        check(self)

    monkeypatch.setattr(folder_module.PartialFolder, "check", meanwhile)
    with pytest.raises(DataError, match=r"data_title_sentence\.bin, .* exist\(s\) already"):
        _run(corpus[:1], tokenizer, tmp_path / "data", json_keys=("text", "title"))
    assert json.loads(Path(f"{others[0].prefix}.json").read_text()) == others[0].metadata
    assert not list(tmp_path.glob("data_text_sentence.[bi]*"))
    result = _run(corpus[:1], tokenizer, tmp_path / "data", json_keys=("text", "title"), overwrite=True)
    assert not list(tmp_path.glob("*.partial")) and result.metadata["json_keys"] == ["text", "title"]


def test_a_finished_dataset_is_recognised(corpus: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    first = _run(corpus, tokenizer, tmp_path / "data")
    before = _contents(first.prefix)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("data*")}
    again = _run(corpus, tokenizer, tmp_path / "data", workers=2, max_bad_records=0.9)
    assert again.was_complete and again.metadata == first.metadata
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("data*")} == times
    with pytest.raises(DataError, match="exist.* already"):
        _run(corpus[:2], tokenizer, tmp_path / "data")
    assert not _run(corpus, tokenizer, tmp_path / "data", overwrite=True).was_complete
    assert _contents(first.prefix) == before
    os.truncate(f"{first.prefix}.bin", 100)
    with pytest.raises(DataError, match="exist.* already"):
        _run(corpus, tokenizer, tmp_path / "data")


def test_the_manifest_is_sha256sums_own(corpus: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    result = _run(corpus, tokenizer, tmp_path / "data")
    command = ["sha256sum", "--check", "--strict", f"{Path(result.prefix).name}.sha256"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [line.split(": ") for line in done.stdout.splitlines()] == [
        [f"data_text_sentence.{extension}", "OK"] for extension in ("bin", "idx", "json")
    ]


@pytest.mark.parametrize("count", [3, 24])
def test_shards_add_up_to_the_whole(corpus: list[Path], tokenizer: Path, tmp_path: Path, count: int) -> None:
    whole = IndexedDataset(_run(corpus, tokenizer, tmp_path / "data", append_eod=True).prefix)
    settings = {"append_eod": True}
    results = [_run(corpus, tokenizer, tmp_path / "part", shard=InputShard(i, count), **settings) for i in range(count)]
    assert Path(results[1].prefix).name == f"part_text_sentence_shard00001-of-{count:05d}"
    parts = [IndexedDataset(result.prefix) for result in results]
    bins = [Path(f"{part.prefix}.bin").read_bytes() for part in parts]
    assert b"".join(bins) == Path(f"{whole.prefix}.bin").read_bytes()
    assert np.concatenate([part.arrays.lengths for part in parts]).tolist() == whole.arrays.lengths.tolist()
    assert sum(part.num_documents for part in parts) == whole.num_documents
    assert sum(result.metadata["input_bytes"] for result in results) == sum(path.stat().st_size for path in corpus)
    assert sum(result.metadata["bad_records"] for result in results) == 2


def test_two_processes_do_not_write_one_dataset(corpus: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    hold = (
        "import sys; from ctxlm_ds.process.run_lock import RunLock\n"
        "lock = RunLock(sys.argv[1]).acquire(); print('held', flush=True); sys.stdin.read()"
    )
    folder = tmp_path / "data_text_sentence.partial"
    command = [sys.executable, "-c", hold, str(folder)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(DataError, match=rf"in use by process {holder.pid} .*choose another --output-prefix"):
            _run(corpus, tokenizer, tmp_path / "data")
    finally:
        holder.communicate()
    result = _run(corpus, tokenizer, tmp_path / "data")
    assert result.metadata["documents"] == 75 and not folder.exists()


def test_a_run_that_lost_its_lock_stops(
    corpus: list[Path], tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = folder_module.PartialFolder.save

    def taken_over(self: folder_module.PartialFolder, progress: folder_module.Progress) -> None:
        (self.path / "lock.json").unlink(missing_ok=True)
        thief = RunLock(self.path)
        thief.acquire()
        try:
            save(self, progress)
        finally:
            thief.release()

    monkeypatch.setattr(folder_module.PartialFolder, "save", taken_over)
    with pytest.raises(RunLockedError, match="no longer locked by this process"):
        _run(corpus, tokenizer, tmp_path / "data")
    assert not (tmp_path / "data_text_sentence.idx").exists()
    assert (tmp_path / "data_text_sentence.partial" / "data_text_sentence.bin.part").exists()  # the other one's now


def test_bad_records_are_counted_and_the_first_kept(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxlm_ds.data.sources.reading.CHUNK_BYTES", 4000)
    lines = ['{"text": "Fine text."}', "{broken", '{"title": "x"}'] * 1500
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(lines))
    contents = []
    for workers in (1, 2):
        result = _run([path], tokenizer, tmp_path / "data", max_bad_records=3000, workers=workers, overwrite=True)
        contents.append(_contents(result.prefix))
    assert contents[0] == contents[1]
    assert result.metadata["bad_records"] == 3000
    assert list(result.metadata["bad_record_reasons"].values()) == [1500, 1500]
    entries = [json.loads(line) for line in contents[0][".errors.jsonl"].splitlines()]
    assert len(entries) == MAX_KEPT
    assert [entry["position"] for entry in entries] == sorted({entry["position"] for entry in entries})
    assert {lines[entry["position"] - 1] for entry in entries} == {"{broken", '{"title": "x"}'}
    assert all(lines[entry["position"] - 1] == entry["excerpt"] for entry in entries)
    fine = tmp_path / "fine.jsonl"
    fine.write_text(lines[0])
    assert ".errors.jsonl" not in _contents(_run([fine], tokenizer, tmp_path / "data", overwrite=True).prefix)


def test_too_many_bad_records_are_told_with_their_reasons(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(["{"] * 30 + ['{"text": "Fine text."}'] * 70))
    assert _run([path], tokenizer, tmp_path / "data", max_bad_records=30).metadata["bad_records"] == 30
    message = r"30 of 100 records are no documents \(30 not valid JSON\), more than the 29 allowed"
    with pytest.raises(DataError, match=message):
        _run([path], tokenizer, tmp_path / "more", max_bad_records=29)


def test_an_input_may_be_named_corpus_json(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "corpus.json"  # the name of the report of tools/prepare_corpus.py
    path.write_text('{"text": "Fine text."}\n' * 3)
    metadata = _run([path], tokenizer, tmp_path / "data").metadata
    assert (metadata["documents"], metadata["cleaning"]) == (3, [])


def test_a_full_disk_keeps_what_was_finished(corpus: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    whole = _run(corpus, tokenizer, tmp_path / "whole" / "data")
    add = writer_module.IndexedDatasetWriter.add_documents

    def add_until_full(self: writer_module.IndexedDatasetWriter, *arguments: Any) -> None:
        if self.num_documents > 30:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module.IndexedDatasetWriter, "add_documents", add_until_full)
        with pytest.raises(DataError, match=r"No space left on device after .* MB of input; .*\.partial is kept"):
            _run(corpus, tokenizer, tmp_path / "data")
    assert [path.name for path in tmp_path.glob("data*")] == ["data_text_sentence.partial"]
    assert _contents(_run(corpus, tokenizer, tmp_path / "data").prefix) == _contents(whole.prefix)


def test_what_prepare_corpus_did_stands_in_the_json(corpus: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    assert _run(corpus, tokenizer, tmp_path / "data").metadata["cleaning"] == []
    cleaned = tmp_path / "cleaned"
    root = Path(__file__).parents[4]
    command = [sys.executable, str(root / "tools" / "prepare_corpus.py"), "--input", str(corpus[0])]
    subprocess.run([*command, "--output-dir", str(cleaned), "--min-words", "5"], check=True, capture_output=True)
    result = _run(sorted(cleaned.glob("*.jsonl.zst")), tokenizer, tmp_path / "again")
    assert [stage["stage"] for stage in result.metadata["cleaning"]].count("length") == 1
