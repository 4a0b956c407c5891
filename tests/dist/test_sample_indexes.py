"""Several ranks that need the same sample index: on one disk, on a disk of each node, of data that differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.data.samples.build import build_rows
from ctxlm_ds.errors import DataError
from ctxlm_ds.parallel.topology import build_topology
from tests.dist.runner import RanksFailed, run_ranks
from tests.sample_data import FakeTokenizer, random_documents, run_config, write_dataset

pytestmark = pytest.mark.dist


def _rows_of(rank: int, prefix: str, folder: str) -> tuple[str, bytes]:
    topology = build_topology()
    config = run_config(data={"sample_index_dir": folder})
    rows = topology.run_together(lambda: build_rows([prefix], FakeTokenizer(), config))
    return rows.indexes[0].meta["key"], rows.indexes[0].records.tobytes()


def _on_nodes(rank: int, world_size: int, prefix: str, parent: str, ranks_a_node: int) -> tuple[str, bytes]:
    return _rows_of(rank, prefix, f"{parent}/node{rank // ranks_a_node}")


@pytest.mark.parametrize("ranks_a_node", [4, 2])
def test_each_disk_gets_one_index_and_all_are_equal(tmp_path: Path, ranks_a_node: int) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(300))
    found = run_ranks(_on_nodes, 4, str(prefix), str(tmp_path), ranks_a_node)
    assert len(set(found)) == 1
    folders = sorted(path.relative_to(tmp_path).parts[0] for path in tmp_path.glob("node*/*"))
    assert folders == [f"node{number}" for number in range(4 // ranks_a_node)]


def _agree(rank: int, world_size: int, prefix: str) -> None:
    from ctxlm_ds.assembly import agreed_data

    topology = build_topology()
    key, _ = _rows_of(rank, prefix, str(Path(prefix).parent))
    assert agreed_data({"index": key}, topology) == {"index": key}
    with pytest.raises(DataError, match=r"rank 1 reads other data than rank 0 .*'index': 'other'.*to every node"):
        agreed_data({"index": key if rank == 0 else "other"}, topology)


def test_ranks_that_see_other_data_are_told(tmp_path: Path) -> None:
    run_ranks(_agree, 2, str(write_dataset(tmp_path / "d", random_documents(30))))


def _one_rank_fails(rank: int, world_size: int, prefix: str) -> None:
    _rows_of(rank, prefix if rank == 0 else f"{prefix}-missing", str(Path(prefix).parent))


def test_a_dataset_missing_on_one_node_ends_every_rank(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(30))
    with pytest.raises(RanksFailed) as failure:
        run_ranks(_one_rank_fails, 2, str(prefix))
    assert str(failure.value).count("no such file") >= 2
