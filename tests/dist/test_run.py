"""Several ranks that need the same sample index: on one disk, on a disk of each node, of data that differs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctxlm_ds.data.index import storage
from ctxlm_ds.errors import DataError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.parallel.topology import build_topology
from ctxlm_ds.process.run_lock import RunLock
from ctxlm_ds.run import RunStates
from ctxlm_ds.run_data import agreed_data, build_rows_by_node
from ctxlm_ds.training.loop.state import TrainState
from tests.dist.forks import RanksFailed, fork_ranks
from tests.sample_data import FakeTokenizer, random_documents, run_config, write_dataset

pytestmark = pytest.mark.dist


TOKENIZER: Any = FakeTokenizer()


def _rows_of(rank: int, prefix: str, folder: str, ranks_a_node: int = 1) -> tuple[str, bytes]:
    topology = build_topology(rank % ranks_a_node, ranks_a_node)
    config = run_config(data={"train": [prefix], "sample_index_dir": folder})
    rows = build_rows_by_node(
        config.row_settings, TOKENIZER, build_objective(config.objective, TOKENIZER), topology
    ).train
    return rows.indexes[0].meta["key"], rows.indexes[0].records.tobytes()


def _on_nodes(rank: int, world_size: int, prefix: str, parent: str, ranks_a_node: int) -> tuple[tuple[str, bytes], int]:
    looks = []

    class CountedLock(RunLock):
        def acquire(self, wait_s: float = 0.0) -> RunLock:
            looks.append(rank)
            return super().acquire(wait_s)

    storage.RunLock = CountedLock  # type: ignore[misc]  # in this rank's own process
    return _rows_of(rank, prefix, f"{parent}/node{rank // ranks_a_node}", ranks_a_node), len(looks)


@pytest.mark.parametrize("ranks_a_node", [4, 2])
def test_each_disk_gets_one_index_and_all_are_equal(tmp_path: Path, ranks_a_node: int) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(300))
    found = fork_ranks(_on_nodes, 4, str(prefix), str(tmp_path), ranks_a_node)
    assert len({rows for rows, _ in found}) == 1
    assert [looks for _, looks in found] == [int(rank % ranks_a_node == 0) for rank in range(4)]
    folders = sorted(path.relative_to(tmp_path).parts[0] for path in tmp_path.glob("node*/*"))
    assert folders == [f"node{number}" for number in range(4 // ranks_a_node)]


def _agree(rank: int, world_size: int, prefix: str) -> None:
    topology = build_topology()
    key, _ = _rows_of(rank, prefix, str(Path(prefix).parent))
    assert agreed_data({"index": key}, topology) == {"index": key}
    with pytest.raises(DataError, match=r"rank 1 reads other data than rank 0 .*'index': 'other'.*to every node"):
        agreed_data({"index": key if rank == 0 else "other"}, topology)


def test_ranks_that_see_other_data_are_told(tmp_path: Path) -> None:
    fork_ranks(_agree, 2, str(write_dataset(tmp_path / "d", random_documents(30))))


def _damaged_index(rank: int, world_size: int, prefix: str) -> None:
    _rows_of(rank, prefix, str(Path(prefix).parent), world_size)


def test_rank_0_finds_a_damaged_index_for_all(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(30))
    fork_ranks(_damaged_index, 2, str(prefix))
    (samples,) = tmp_path.glob("*/samples.npy")
    content = bytearray(samples.read_bytes())
    content[-1] ^= 1
    samples.write_bytes(content)
    with pytest.raises(RanksFailed) as failure:
        fork_ranks(_damaged_index, 2, str(prefix))
    assert str(failure.value).count("the file was changed after it was made") >= 2


def _one_rank_fails(rank: int, world_size: int, prefix: str) -> None:
    _rows_of(rank, prefix if rank == 0 else f"{prefix}-missing", str(Path(prefix).parent))


def test_a_dataset_missing_on_one_node_ends_every_rank(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(30))
    with pytest.raises(RanksFailed) as failure:
        fork_ranks(_one_rank_fails, 2, str(prefix))
    assert str(failure.value).count("no such file") >= 2


def test_a_run_that_goes_back_first_forgets_its_updates() -> None:
    """The checkpoint of steps that were all skipped has no moments that would replace those of later steps."""
    done: list[str] = []
    engine = SimpleNamespace(forget_updates=lambda: done.append("forgotten"))
    checkpoints: Any = SimpleNamespace(
        engine=engine, beginning=None, resume=lambda folder: done.append("loaded") or TrainState(step=5)
    )
    manager: Any = SimpleNamespace(find_resumable=lambda: None, remove_after=lambda step: done.append(f"after {step}"))
    states = RunStates(manager, checkpoints, lambda folder: None, 0, lambda folder: TrainState())
    assert states.load_last_good().step == 5 and done == ["forgotten", "loaded", "after 5"]
