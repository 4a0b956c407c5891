"""The folder of an unfinished dataset: progress of something else, of another process, of a run that lost its lock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ctxlm_ds.data.preprocess import job as job_module
from ctxlm_ds.errors import DataError, RunLockedError
from ctxlm_ds.process.run_lock import RunLock
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents
from tests.unit.data.preprocess.test_job_resume import Killed, contents_of, kill_at, run


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
