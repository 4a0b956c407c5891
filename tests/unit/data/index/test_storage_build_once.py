"""One builder a folder: real processes that build, wait, die and take over."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from ctxlm_ds.data.index import storage
from ctxlm_ds.data.index.storage import META_NAME, build_once
from ctxlm_ds.errors import DataError
from ctxlm_ds.process.run_lock import LOCK_NAME, RunLock, this_process
from tests.sample_data import FakeTokenizer, build_sample_index, random_documents, run_config, write_dataset

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
