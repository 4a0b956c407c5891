"""The locked folder of unfinished files: a killed process's is taken over, a living one's is left alone."""

from __future__ import annotations

import logging
import multiprocessing
import time
from pathlib import Path

import pytest

from ctxlm_ds.data.dataset.inspection import verify_dataset
from ctxlm_ds.data.dataset.merge import merge_datasets
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.errors import DataError
from ctxlm_ds.process.run_lock import RunLock
from tests.unit.data.dataset.test_merge import write_parts


@pytest.fixture
def parts(tmp_path: Path) -> list[str]:
    return write_parts(tmp_path / "parts", vocab_size=1000)


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
