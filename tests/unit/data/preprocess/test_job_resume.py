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
from ctxlm_ds.data.preprocess import job as job_module
from ctxlm_ds.data.preprocess.job import PartialFolder, PreprocessConfig, PreprocessResult, Progress, preprocess
from ctxlm_ds.data.sources.types import InputShard
from ctxlm_ds.errors import DataError, RunLockedError
from ctxlm_ds.process.run_lock import RunLock
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents


def run(corpus: list[Path], tokenizer: Path, prefix: Path, **settings: Any) -> PreprocessResult:
    config = PreprocessConfig(**{"max_bad_records": 5, "split_sentences": True, **settings})
    return preprocess([str(path) for path in corpus], tokenizer, prefix, config)[0]


def contents_of(prefix: str | Path) -> dict[str, bytes]:
    path = Path(prefix)
    files = [file for file in path.parent.glob(f"{path.name}*") if file.is_file()]
    return {file.name.removeprefix(path.name): file.read_bytes() for file in files}


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the program may run behind it."""


def kill_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the run at its step-th write, save or rename, without any tidying."""
    done = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal done
            done += 1
            if done > step:
                raise Killed
            return function(*arguments, **named)

        return call

    monkeypatch.setattr(writer_module.IndexedDatasetWriter, "add_documents",
                        counted(writer_module.IndexedDatasetWriter.add_documents))  # fmt: skip
    monkeypatch.setattr(writer_module.IndexedDatasetWriter, "save", counted(writer_module.IndexedDatasetWriter.save))
    monkeypatch.setattr(job_module, "write_text", counted(job_module.write_text))
    monkeypatch.setattr(writer_module, "publish", counted(writer_module.publish))
    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **named: None)


@pytest.mark.long
def test_a_killed_run_is_gone_on_with_to_the_same_bytes(corpus: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    whole = run(corpus, tokenizer, tmp_path / "whole" / "data")
    saves: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_module, "write_text", lambda *_: saves.append(1))
        run(corpus, tokenizer, tmp_path / "count" / "data")
    end = 3 * len(saves) + 5
    for step in (0, 3, 20, *range(end - 8, end)):  # the last ones: preparing and renaming
        prefix = tmp_path / f"parts{step}" / "data_text_sentence"
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            kill_at(step, patch)
            run(corpus, tokenizer, prefix.parent / "data")
        with pytest.raises(DataError, match="no such file"):
            IndexedDataset(prefix)
        assert not Path(f"{prefix}.idx").exists()
        result = run(corpus, tokenizer, prefix.parent / "data")
        assert not result.was_complete
        assert contents_of(prefix) == contents_of(whole.prefix), step
        assert result.metadata["bad_record_reasons"] == whole.metadata["bad_record_reasons"]


def test_a_piece_is_not_read_twice(
    corpus: list[Path], tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(30, patch)
        run(corpus, tokenizer, tmp_path / "data")
    progress = json.loads((tmp_path / "data_text_sentence.partial" / "progress.json").read_text())
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        add = writer_module.IndexedDatasetWriter.add_documents
        patch.setattr(
            writer_module.IndexedDatasetWriter,
            "add_documents",
            lambda self, *documents: (seen.append(len(documents[2])), add(self, *documents)),
        )
        result = run(corpus, tokenizer, tmp_path / "data")
    assert progress["writers"][0]["documents"] > 0
    assert sum(seen) == result.metadata["documents"] - progress["writers"][0]["documents"]


@pytest.mark.parametrize("other_build", [False, True])
def test_overwrite_goes_on_with_progress_of_its_own_build(
    corpus: list[Path], tokenizer: Path, tmp_path: Path, other_build: bool, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(corpus, tokenizer, tmp_path / "whole" / "data")
    older = run(corpus[:2], tokenizer, tmp_path / "data")
    before = contents_of(older.prefix)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(30, patch)
        run(corpus, tokenizer, tmp_path / "data", overwrite=True, append_eod=other_build)
    assert contents_of(older.prefix) == before
    caplog.clear()
    with caplog.at_level("INFO", logger="ctxlm_ds"):
        again = run(corpus, tokenizer, tmp_path / "data", overwrite=True)
    assert ("resuming after" in caplog.text) != other_build
    assert ("another input, tokenizer or setting; starting again" in caplog.text) == other_build
    assert contents_of(again.prefix) == contents_of(whole.prefix)


def test_a_dataset_that_appears_meanwhile_is_not_replaced(
    corpus: list[Path], tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in corpus:
        path.unlink()
    lines = [json.dumps({"title": f"Title {number}.", "text": "Some text."}) for number in range(20)]
    corpus[0].write_text("\n".join(lines))
    check = job_module.PartialFolder.check
    others: list[PreprocessResult] = []

    def meanwhile(self: job_module.PartialFolder) -> None:
        monkeypatch.setattr(job_module.PartialFolder, "check", check)
        others.append(run(corpus[:1], tokenizer, tmp_path / "data", json_keys=("title",)))
        check(self)

    monkeypatch.setattr(job_module.PartialFolder, "check", meanwhile)
    with pytest.raises(DataError, match=r"data_title_sentence\.bin, .* exist\(s\) already"):
        run(corpus[:1], tokenizer, tmp_path / "data", json_keys=("text", "title"))
    assert json.loads(Path(f"{others[0].prefix}.json").read_text()) == others[0].metadata
    assert not list(tmp_path.glob("data_text_sentence.[bi]*"))
    result = run(corpus[:1], tokenizer, tmp_path / "data", json_keys=("text", "title"), overwrite=True)
    assert not list(tmp_path.glob("*.partial")) and result.metadata["json_keys"] == ["text", "title"]


def test_a_finished_dataset_is_recognised(corpus: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    first = run(corpus, tokenizer, tmp_path / "data")
    before = contents_of(first.prefix)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("data*")}
    again = run(corpus, tokenizer, tmp_path / "data", workers=2, max_bad_records=0.9)
    assert again.was_complete and again.metadata == first.metadata
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("data*")} == times
    with pytest.raises(DataError, match="exist.* already"):
        run(corpus[:2], tokenizer, tmp_path / "data")
    assert not run(corpus, tokenizer, tmp_path / "data", overwrite=True).was_complete
    assert contents_of(first.prefix) == before
    os.truncate(f"{first.prefix}.bin", 100)
    with pytest.raises(DataError, match="exist.* already"):
        run(corpus, tokenizer, tmp_path / "data")


@pytest.mark.parametrize("count", [3, 24])
def test_shards_add_up_to_the_whole(corpus: list[Path], tokenizer: Path, tmp_path: Path, count: int) -> None:
    whole = IndexedDataset(run(corpus, tokenizer, tmp_path / "data", append_eod=True).prefix)
    settings = {"append_eod": True}
    results = [run(corpus, tokenizer, tmp_path / "part", shard=InputShard(i, count), **settings) for i in range(count)]
    assert Path(results[1].prefix).name == f"part_text_sentence_shard00001-of-{count:05d}"
    parts = [IndexedDataset(result.prefix) for result in results]
    bins = [Path(f"{part.prefix}.bin").read_bytes() for part in parts]
    assert b"".join(bins) == Path(f"{whole.prefix}.bin").read_bytes()
    assert np.concatenate([part.arrays.lengths for part in parts]).tolist() == whole.arrays.lengths.tolist()
    assert sum(part.num_documents for part in parts) == whole.num_documents
    assert sum(result.metadata["input_bytes"] for result in results) == sum(path.stat().st_size for path in corpus)
    assert sum(result.metadata["bad_records"] for result in results) == 2


def test_a_full_disk_keeps_what_was_finished(corpus: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    whole = run(corpus, tokenizer, tmp_path / "whole" / "data")
    add = writer_module.IndexedDatasetWriter.add_documents

    def add_until_full(self: writer_module.IndexedDatasetWriter, *arguments: Any) -> None:
        if self.num_documents > 30:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module.IndexedDatasetWriter, "add_documents", add_until_full)
        with pytest.raises(DataError, match=r"No space left on device after .* MB of input; .*\.partial is kept"):
            run(corpus, tokenizer, tmp_path / "data")
    assert [path.name for path in tmp_path.glob("data*")] == ["data_text_sentence.partial"]
    assert contents_of(run(corpus, tokenizer, tmp_path / "data").prefix) == contents_of(whole.prefix)


@pytest.mark.parametrize(
    "change",
    [
        *["settings", "splitter", "source", "tokenizer", "progress", "count", "uncounted", "cut"],
        "bit of bin",
        "bit of lengths",
        "bit of documents",
    ],
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
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(30, patch)
        run(corpus, tokenizer, prefix)
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
    elif change == "uncounted":  # of a version before words were counted

        def without_words(folder: PartialFolder) -> Progress | None:
            if (progress := load(folder)) is not None:
                progress.counts.pop("words: text")
            return progress

        load = PartialFolder.load
        monkeypatch.setattr(PartialFolder, "load", without_words)
    elif change == "cut":
        os.truncate(folder / "data_text_sentence.bin.part", 10)
    else:
        path = folder / f"data_text_sentence.{change.split()[-1]}.part"
        content = bytearray(path.read_bytes())
        content[4] ^= 1
        path.write_bytes(content)
    caplog.clear()
    result = run(corpus, tokenizer, prefix, **settings)
    assert "starting again" in caplog.text
    assert contents_of(result.prefix) == contents_of(run(corpus, tokenizer, tmp_path / "b" / "data", **settings).prefix)


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
            run(corpus, tokenizer, tmp_path / "data")
    finally:
        holder.communicate()
    result = run(corpus, tokenizer, tmp_path / "data")
    assert result.metadata["documents"] == 75 and not folder.exists()


def test_a_run_that_lost_its_lock_stops(
    corpus: list[Path], tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = job_module.PartialFolder.save

    def taken_over(self: job_module.PartialFolder, progress: job_module.Progress) -> None:
        (self.path / "lock.json").unlink(missing_ok=True)
        thief = RunLock(self.path)
        thief.acquire()
        try:
            save(self, progress)
        finally:
            thief.release()

    monkeypatch.setattr(job_module.PartialFolder, "save", taken_over)
    with pytest.raises(RunLockedError, match="no longer locked by this process"):
        run(corpus, tokenizer, tmp_path / "data")
    assert not (tmp_path / "data_text_sentence.idx").exists()
    assert (tmp_path / "data_text_sentence.partial" / "data_text_sentence.bin.part").exists()  # the other one's now
