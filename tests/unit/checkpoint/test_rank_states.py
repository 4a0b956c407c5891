"""Memory that a process could still take, also in a real cgroup with a limit, and whether the ranks of a node fit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ctxlm_ds.checkpoint import rank_states
from ctxlm_ds.checkpoint.rank_states import find_shortage, memory_need

GB = 10**9


@pytest.fixture
def limited_cgroup() -> Iterator[Path]:
    """A cgroup of 300 MB, of version 1 or 2, that a child may enter."""
    cgroups = Path("/sys/fs/cgroup")
    for root, limit in ((cgroups / "memory", "memory.limit_in_bytes"), (cgroups, "memory.max")):
        folder = root / f"ctxlm-test-{os.getpid()}"
        if not (root / "cgroup.procs").exists():
            continue
        try:
            folder.mkdir()
            (folder / limit).write_text(str(300 << 20))
        except OSError:
            if folder.is_dir():
                folder.rmdir()
            continue
        yield folder
        folder.rmdir()
        return
    pytest.skip("no cgroup can be made here (root, and a memory controller)")


def test_a_real_limit_counts(limited_cgroup: Path) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        (limited_cgroup / "cgroup.procs").write_text(str(os.getpid()))
        need = memory_need(10 << 30)
        os.write(writer, repr({name: left for name, (_, left) in need.items()}).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    available = eval(os.read(reader, 65536))
    own = {name: left for name, left in available.items() if limited_cgroup.name in name}
    assert len(own) == 1 and 200 << 20 < next(iter(own.values())) <= 300 << 20
    # Beside it the machine's own memory, without a name of a cgroup.
    assert any("cgroup" not in name and left > 300 << 20 for name, left in available.items())


def test_this_process_has_some_memory_left() -> None:
    need = memory_need(1)
    assert need and min(left for _, left in need.values()) > 1 << 20
    assert find_shortage([need]) is None
    assert "GB wanted" in str(find_shortage([memory_need(1 << 50)]))


def test_limits_are_looked_for_up_to_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").write_text("0::/slurm/job/step\n")
    monkeypatch.setattr(rank_states, "virtual_memory", lambda: SimpleNamespace(available=50 * 1024))
    limits = {"": "max", "slurm": "max", "slurm/job": "1000000", "slurm/job/step": "max"}
    for path, limit in limits.items():
        folder = tmp_path / "root" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text("700000\n")
        (folder / "memory.stat").write_text("anon 600000\ninactive_file 90000\nactive_file 10000\n")
    need = memory_need(5, tmp_path / "own", tmp_path / "root")
    assert sorted(need.values()) == [(5, 50 * 1024), (5, 400_000)]
    assert [name for name in need if name.endswith("cgroup /slurm/job")]


def test_ranks_of_a_machine_share_it_and_tasks_of_a_limit_share_that() -> None:
    def need(gigabytes: float, **places: float) -> dict[str, tuple[int, int]]:
        return {name: (int(gigabytes * GB), int(left * GB)) for name, left in places.items()}

    assert find_shortage([need(3, a=10), need(3, a=10), need(3, b=10)]) is None
    shortage = find_shortage([need(5, a=10), need(5, a=9.5), need(3, b=10)])
    assert shortage == "10.0 GB wanted, 9.5 GB available on a"
    assert find_shortage([need(3, a=100, task0=4), need(3, a=100, task1=4)]) is None
    assert find_shortage([need(3, a=100, step=4), need(3, a=100, step=4)]) is not None
