"""The files of a sample index: plain .npy files, damage, checksums; and one builder a folder, in real processes."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.data.index import storage
from ctxlm_ds.data.index.build import IndexPlace
from ctxlm_ds.data.index.storage import META_NAME, NpyAppender, build_once, open_array
from ctxlm_ds.errors import DataError
from ctxlm_ds.process.run_lock import LOCK_NAME, RunLock, this_process
from tests.sample_data import FakeTokenizer, build_sample_index, random_documents, run_config, write_dataset
from tests.unit.data.index.test_index import BERT, config_of


def test_damage_is_named(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(5))
    config = config_of("full_sentences")
    directory = build_sample_index(prefix, BERT, config).directory
    samples = directory / "samples.npy"
    whole = samples.read_bytes()
    samples.write_bytes(whole[:-5])
    with pytest.raises(DataError, match=rf"samples\.npy: has {len(whole) - 5} bytes instead of {len(whole)}"):
        IndexPlace.of(prefix, BERT, config.row_settings).open(BERT)
    samples.unlink()
    with pytest.raises(DataError, match="is missing"):
        IndexPlace.of(prefix, BERT, config.row_settings).open(BERT)
    (directory / "meta.json").write_text("{")
    with pytest.raises(DataError, match=r"meta\.json"):
        IndexPlace.of(prefix, BERT, config.row_settings).open(BERT)
    samples.write_bytes(b"not an array" * 10)
    with pytest.raises(DataError, match="not readable"):
        open_array(directory, "samples")


def test_checksums_are_those_of_sha256sum_and_a_changed_bit_is_noticed(tmp_path: Path) -> None:
    prefix, config = write_dataset(tmp_path / "d", random_documents(5)), config_of("full_sentences")
    index = build_sample_index(prefix, BERT, config)
    listed = "".join(f"{entry['sha256']}  {name}\n" for name, entry in index.meta["files"].items())
    subprocess.run(["sha256sum", "-c", "--strict", "-"], input=listed, text=True, check=True, cwd=index.directory)
    samples = index.directory / "samples.npy"
    content = bytearray(samples.read_bytes())
    content[-10] ^= 1
    samples.write_bytes(content)
    build_sample_index(prefix, BERT, config, verify="none")
    with pytest.raises(DataError, match=r"samples\.npy: sha256 .*meta\.json records .*delete the folder"):
        build_sample_index(prefix, BERT, config)


def test_files_are_read_once_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix, config = write_dataset(tmp_path / "d", random_documents(5)), config_of("full_sentences")
    directory = build_sample_index(prefix, BERT, config).directory
    read: list[str] = []
    digest = storage.file_digest
    monkeypatch.setattr(storage, "file_digest", lambda path: (read.append(path.name), digest(path))[1])

    def files_read() -> list[str]:
        read.clear()
        build_sample_index(prefix, BERT, config, verify="changed")
        return read

    assert files_read() == files_read() == ["samples.npy"], "a file this young may change again within a tick"
    monkeypatch.setattr(storage, "SETTLED_NS", -(10**12))
    assert files_read() == ["samples.npy"] and files_read() == []
    read.clear()
    written_ns = (directory / "verified.json").stat().st_mtime_ns
    build_sample_index(prefix, BERT, config)
    assert read == ["samples.npy"], "only the start of a job leaves files out"
    assert (directory / "verified.json").stat().st_mtime_ns == written_ns, "nothing new is known"
    (directory / "verified.json").write_text("[" * 100_000)
    assert files_read() == ["samples.npy"] and files_read() == []

    samples = directory / "samples.npy"
    content, state = samples.read_bytes(), samples.stat()
    copy = directory.parent / "copy.npy"
    copy.write_bytes(content)
    copy.replace(samples)
    assert files_read() == ["samples.npy"] and files_read() == [], "another inode"
    samples.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(samples, ns=(state.st_atime_ns, state.st_mtime_ns))
    for _ in range(2):
        with pytest.raises(DataError, match=r"samples\.npy: sha256 .*meta\.json records"):
            build_sample_index(prefix, BERT, config, verify="changed")


def test_a_folder_that_cannot_be_written_to_is_read_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix, config = write_dataset(tmp_path / "d", random_documents(5)), config_of("full_sentences")
    index = build_sample_index(prefix, BERT, config)

    def refused(path: Path, text: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(storage, "SETTLED_NS", -(10**12))
    monkeypatch.setattr(storage, "write_text", refused)
    storage.verify_files(index.directory, index.meta, trust=True)
    assert not (index.directory / "verified.json").exists()


def test_a_renamed_index_is_refused(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(5))
    short, long = config_of("full_sentences", 32), config_of("full_sentences", 64)
    one, other = (build_sample_index(prefix, BERT, config).directory for config in (short, long))
    shutil.rmtree(one)
    other.rename(one)
    with pytest.raises(DataError, match=r"meta\.json: this is the index with the key .*renamed"):
        build_sample_index(prefix, BERT, short)
    meta = json.loads((one / "meta.json").read_text())
    (one / "meta.json").write_text(json.dumps(meta | {"files": {"samples.npy": 5}}))
    with pytest.raises(DataError, match="not the description of a sample index"):
        IndexPlace.of(prefix, BERT, short.row_settings).open(BERT)


def test_growing_arrays_are_plain_npy_files(tmp_path: Path) -> None:
    path = tmp_path / "values.npy"
    with NpyAppender(path, np.int32) as file:
        for begin in range(0, 100_000, 1000):
            file.append(np.arange(begin, begin + 1000))
    assert np.array_equal(np.load(path), np.arange(100_000, dtype=np.int32))
    with NpyAppender(tmp_path / "empty.npy", np.int64):
        pass
    assert open_array(tmp_path, "empty").shape == (0,)


FORK = multiprocessing.get_context("fork")
CONTENT = "the samples"


def fill_slowly(log: Path, folder: Path, seconds: float = 0.3) -> None:
    """Say who fills, write a file, take a while, write meta.json."""
    with open(log, "a", encoding="utf-8") as handle:
        handle.write(f"{os.getpid()}\n")
    (folder / "samples.npy").write_text(CONTENT)
    time.sleep(seconds)
    (folder / META_NAME).write_text("{}")


def builders(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()]


def wait_for(condition: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit_s
        time.sleep(0.01)


def start(final: Path, fill: Callable[[Path], None], count: int = 1) -> list[multiprocessing.Process]:
    processes = [FORK.Process(target=build_once, args=(final, fill)) for _ in range(count)]
    for process in processes:
        process.start()
    return processes  # type: ignore[return-value]


def end_well(processes: list[multiprocessing.Process]) -> None:
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0


def test_of_many_processes_one_builds_and_nothing_else_is_left(tmp_path: Path) -> None:
    log, final = tmp_path / "log", tmp_path / "built" / "index"
    end_well(start(final, partial(fill_slowly, log), count=6))
    assert len(builders(log)) == 1
    assert [entry.name for entry in final.parent.iterdir()] == ["index"]
    assert sorted(entry.name for entry in final.iterdir()) == [META_NAME, "samples.npy"]


@pytest.mark.long
def test_a_killed_builders_work_is_taken_over_by_exactly_one_waiter(tmp_path: Path) -> None:
    log, final = tmp_path / "log", tmp_path / "built" / "index"
    (first,) = start(final, partial(fill_slowly, log, seconds=60.0))
    wait_for(lambda: log.exists() and len(builders(log)) == 1)
    waiters = start(final, partial(fill_slowly, log), count=4)
    time.sleep(0.2)
    assert builders(log) == [first.pid] and not final.exists()
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    end_well(waiters)
    assert len(builders(log)) == 2 and builders(log)[1] in {waiter.pid for waiter in waiters}
    assert [entry.name for entry in final.parent.iterdir()] == ["index"]
    assert (final / "samples.npy").read_text() == CONTENT


def foreign_lock(workplace: Path, age_s: float) -> Path:
    """The lock of a builder on another host, with a heartbeat of that age."""
    workplace.mkdir(parents=True)
    path = workplace / LOCK_NAME
    path.write_text(json.dumps(asdict(replace(this_process(), host="elsewhere", boot_id="another"))))
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


def test_another_hosts_lock_expires_and_one_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "RunLock", partial(RunLock, stale_after_s=0.5, heartbeat_s=0.1))
    log, final = tmp_path / "log", tmp_path / "built" / "index"
    foreign_lock(final.with_name("index.building"), age_s=1000.0)
    (final.with_name("index.building") / "index-dead").mkdir()
    end_well(start(final, partial(fill_slowly, log), count=4))
    assert len(builders(log)) == 1
    assert [entry.name for entry in final.parent.iterdir()] == ["index"]


@pytest.mark.long
def test_another_hosts_living_lock_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(storage, "RunLock", partial(RunLock, stale_after_s=0.5, heartbeat_s=0.1))
    log, final = tmp_path / "log", tmp_path / "index"
    path = foreign_lock(final.with_name("index.building"), age_s=0.0)
    with caplog.at_level(logging.INFO, logger="ctxlm_ds"):
        waiter = threading.Thread(target=build_once, args=(final, partial(fill_slowly, log)))
        waiter.start()
        for _ in range(15):
            os.utime(path)
            time.sleep(0.1)
        assert waiter.is_alive() and not log.exists()
        final.mkdir()
        (final / META_NAME).write_text("{}")
        waiter.join(timeout=30)
    assert not waiter.is_alive() and not log.exists()
    messages = [record.getMessage() for record in caplog.records]
    (waiting,) = (message for message in messages if "waiting for the sample index" in message)
    assert "on elsewhere" in waiting and waiting.endswith(" builds") and "scancel" not in waiting


def test_a_builder_that_lost_its_lock_leaves_the_folder_to_its_successor(tmp_path: Path) -> None:
    """As a suspended process finds it when it wakes up: its files are gone, another one's are in their place."""
    final = tmp_path / "index"
    successor = tmp_path / "index.building" / "index-successor"
    filled = []

    def fill(folder: Path) -> None:
        filled.append(folder)
        (folder.parent / LOCK_NAME).write_text(json.dumps(asdict(this_process())))
        folder.rmdir()
        successor.mkdir()
        fill_slowly(tmp_path / "log", successor, seconds=0.0)
        threading.Timer(0.3, lambda: successor.rename(final)).start()
        (folder / "samples.npy").write_text("too late")

    build_once(final, fill)
    assert len(filled) == 1
    assert (final / "samples.npy").read_text() == CONTENT


def test_nothing_is_left_of_a_failed_build(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "samples.npy").write_text(CONTENT)
        raise DataError("no text")

    with pytest.raises(DataError, match="no text"):
        build_once(tmp_path / "index", fail)
    assert not list(tmp_path.iterdir())
    (tmp_path / "index").mkdir()
    with pytest.raises(DataError, match=r"index: has no meta\.json; it is damaged, delete the folder"):
        build_once(tmp_path / "index", fail)


def test_a_full_disk_and_a_folder_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    """The limit of a file's size is met as a full disk is: in the middle of a write."""

    def fill(folder: Path) -> None:
        (folder / "samples.npy").write_bytes(bytes(1 << 20))

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit_bytes in (1 << 16, 0):  # while filling, while locking
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
        try:
            with pytest.raises(DataError, match=rf"{tmp_path}.* index cannot be built .*File too large.*free space"):
                build_once(tmp_path / "index", fill)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", Path("/proc/self/none")):
        with pytest.raises(DataError, match=rf"{folder}: .*set data\.sample_index_dir to a folder that can be written"):
            build_once(folder / "index", fill)


@pytest.mark.long
@pytest.mark.parametrize("trials", [6, pytest.param(100, marks=pytest.mark.soak)])
def test_killed_at_any_moment_an_index_is_whole_or_not_there(tmp_path: Path, trials: int) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(300, sentences=5, tokens=8))
    config = run_config(data={"num_duplicates": 40, "packing": True})
    tokenizer = FakeTokenizer()
    shutil.rmtree(build_sample_index(prefix, tokenizer, config).directory)  # compiles
    began_s = time.perf_counter()
    expected = build_sample_index(prefix, tokenizer, config)
    whole = {entry.name: entry.read_bytes() for entry in expected.directory.iterdir()}
    longest_s = 1.5 * (time.perf_counter() - began_s)
    draws = random.Random(1)
    for trial in range(trials):
        prefix = write_dataset(tmp_path / f"k{trial}" / "d", random_documents(300, sentences=5, tokens=8))
        builder = FORK.Process(target=build_sample_index, args=(prefix, tokenizer, config))
        builder.start()
        time.sleep(draws.uniform(0.0, longest_s))
        builder.kill()
        builder.join()
        final = prefix.parent / expected.directory.name
        if final.exists():
            assert set(whole) == {entry.name for entry in final.iterdir()}
        index = build_sample_index(prefix, tokenizer, config)
        assert index.directory == final
        found = {entry.name: entry.read_bytes() for entry in final.iterdir()}
        assert {name: found[name] for name in whole if name != META_NAME} == {
            name: whole[name] for name in whole if name != META_NAME
        }
        assert not list(prefix.parent.glob("*.building"))
