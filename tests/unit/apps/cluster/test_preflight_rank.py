"""What a rank of a preflight looks at: its groups, its node, its GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.cluster import preflight_rank
from ctxlm_ds.apps.cluster.preflight_rank import groups_of, look_at_gpus, look_at_node
from ctxlm_ds.apps.cluster.settings import PREFLIGHT
from ctxlm_ds.process.slurm import SlurmTask


@pytest.mark.parametrize("counts", [[1], [8], [1, 1], [2, 1, 3], [2] * 4, [1] * 33])
def test_groups_meet_and_every_node_has_two_neighbours(counts: list[int]) -> None:
    hosts = tuple(f"n{number}" for number in range(len(counts)))
    members: dict[str, list[tuple[int, int]]] = {}
    turns: dict[str, set[int]] = {}
    for own, count in enumerate(counts):
        for local in range(count):
            groups = groups_of(SlurmTask(0, sum(counts), local, count, hosts, 15000), own, counts)
            found_turns = [turn for turn, *_ in groups]
            assert found_turns == sorted(set(found_turns))
            assert all(1 <= turn <= preflight_rank.MOST_TURNS for turn in found_turns)
            for turn, partner, name, rank, size in groups:
                assert (partner == hosts[own]) == name.startswith("node-")
                members.setdefault(name, []).append((rank, size))
                turns.setdefault(name, set()).add(turn)
            if local == 0 and len(counts) > 2:
                assert len({partner for _, partner, *_ in groups} - {hosts[own]}) == 2
    for found in members.values():
        assert sorted(found) == [(rank, found[0][1]) for rank in range(found[0][1])]
    assert all(len(found) == 1 for found in turns.values())


def test_a_node_looks_at_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("x")
    monkeypatch.setenv("CTXLM_STAGE_DIR", str(tmp_path / "token"))
    record: dict[str, Any] = {"node": "n1", "faults": []}
    look_at_node(record, {**PREFLIGHT, "MIN_RUN_GB": 1e9, "MIN_MEMORY_GB": 0}, tmp_path / "new", tmp_path / "token")
    scratch, run_dir = record["faults"]
    assert scratch == f"scratch {tmp_path / 'token'} cannot be written: File exists"
    assert run_dir.startswith(f"run directory {tmp_path / 'new'} has ") and run_dir.endswith("1e+09 are needed")
    assert list((tmp_path / "new").iterdir()) == []
    look_at_node(record, {**PREFLIGHT, "LIMIT_S": 0}, tmp_path, tmp_path / "gone")
    assert "does not see what the batch script writes" in record["faults"][-1]
    assert not list(tmp_path.rglob(".preflight-*"))


def test_gpus_are_asked_for_memory_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[str] = []
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho 'NVIDIA H100, 80 GB, 81559, 3, 0'\necho 'NVIDIA H100, 80 GB, 81559, 70000, [N/A]'\n"
        "echo 'NVIDIA H100, 80 GB, 81559, 3, 2'\necho 'Unable to determine the device handle for GPU 3: Unknown Error'"
    )
    smi.chmod(0o755)
    assert look_at_gpus(0.9, faults) == "3 x NVIDIA H100, 80 GB, 81559 MiB"
    assert faults == [
        "GPU 1: 70000 of 81559 MiB are in use, 0.9 of them must be free",
        "GPU 2: 2 uncorrected ECC errors, 0 are allowed",
        "nvidia-smi: Unable to determine the device handle for GPU 3: Unknown Error",
    ]  # fmt: skip
    smi.write_text("#!/bin/sh\nexec sleep 60")
    monkeypatch.setattr(preflight_rank, "NVIDIA_SMI_S", 0.2)
    assert look_at_gpus(0.9, faults) == "none"
    assert faults[-1] == "nvidia-smi: Fail: no answer within 0.2 s"
    smi.write_text("#!/bin/sh\necho 'No devices were found'")
    assert look_at_gpus(0.9, []) == "none"
