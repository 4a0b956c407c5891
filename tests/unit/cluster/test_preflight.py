"""What a preflight concludes from what the ranks saw, and what it asks of Slurm."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctxlm_ds.cluster import preflight_rank, slurm_commands
from ctxlm_ds.cluster.preflight import decide, judge
from ctxlm_ds.cluster.preflight_rank import groups_of, look_at_gpus, look_at_node
from ctxlm_ds.cluster.restart_policy import Outcome
from ctxlm_ds.cluster.settings import PREFLIGHT, misspelt, read_preflight
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.process.slurm import SlurmTask

NODES = ("n1", "n2", "n3", "n4")
EMPTY: dict[str, Any] = {"faults": [], "gb_per_s": {}, "errors": {}}


def records(nodes: tuple[str, ...] = NODES, **changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Two ranks a node; `changes` by node, for both."""
    usual = {**EMPTY, "gpus": "2 x H100", "free_gb": {"memory": 50.0}, "sent_unix_s": 100.0, "received_unix_s": 100.01}
    return [{**usual, "node": node, "local_rank": local, **changes.get(node, {})} for node in nodes for local in (0, 1)]


def judged(found: list[dict[str, Any]], nodes: tuple[str, ...] = NODES) -> dict[str, Any]:
    return judge(dict.fromkeys(nodes, 2), found, PREFLIGHT)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"faults": ["scratch /s has 0.10 GB free, 1 are needed"]}, "scratch /s has 0.10 GB free"),
        ({"gpus": "1 x H100"}, "GPUs: 1 x H100, elsewhere 2 x H100"),
        ({"sent_unix_s": 109.0}, "its clock is +9.00 s from the nodes' median (2 s allowed)"),
        ({"gb_per_s": {"n2": 1.0, "n4": 1.0}}, "reductions with other nodes at 1 GB/s, the nodes' median is 9 (0.5"),
        ({"gb_per_s": {"n3": 3.0, "p": 9.0}}, "reductions among its own ranks at 3 GB/s, the nodes' median is 90 (0.5"),
        ({"gb_per_s": {}, "errors": {"n2": "with n2: hung", "n4": "-"}}, "no reduction with other nodes worked"),
    ],
)
def test_the_odd_node_is_named(change: dict[str, Any], reason: str) -> None:
    speeds = {node: {"gb_per_s": {"n3": 1.0, "p": 9.0, node: 90.0}} for node in NODES}
    assert judged(records(**speeds))["bad"] == {}
    bad = judged(records(**{**speeds, "n3": {**speeds["n3"], **change}}))["bad"]
    assert list(bad) == ["n3"]
    assert reason in bad["n3"]


def test_missing_ranks_are_named() -> None:
    kept = [one for one in records() if (one["node"], one["local_rank"]) not in (("n2", 0), ("n2", 1), ("n3", 1))]
    assert judged(kept)["bad"] == {
        "n2": "0 of 2 ranks answered within 120 s", "n3": "1 of 2 ranks answered within 120 s"
    }  # fmt: skip
    begun = [{key: one[key] for key in one if key != "gpus"} if one["node"] == "n4" else one for one in records()]
    assert list(judged(begun)["bad"]) == ["n4"]


def test_the_quickest_line_tells_the_clock() -> None:
    late = [{**one, "received_unix_s": 160.0} for one in records() if one["node"] == "n2"]
    found = judged([*late, *records(), *late])
    assert found["bad"] == {}
    assert found["clock_s"]["n2"] == pytest.approx(0.0, abs=0.01)


def test_of_two_nodes_the_batch_scripts_is_right_and_neither_is_slow() -> None:
    two = NODES[:2]
    assert list(judged(records(two, n1={"sent_unix_s": 109.0}), two)["bad"]) == ["n2"]
    assert list(judged(records(two, n2={"gpus": "none"}), two)["bad"]) == ["n2"]
    speeds = {"n1": {"gb_per_s": {"n1": 1.0, "n2": 1.0}}, "n2": {"gb_per_s": {"n2": 99.0, "n1": 1.0}}}
    assert judged(records(two, **speeds), two)["bad"] == {}


def test_no_node_is_blamed_if_no_two_can_reduce(capfd: pytest.CaptureFixture[str]) -> None:
    broken = {node: {"errors": {"n1": "with n1: no NCCL"}} for node in ("n2", "n3", "n4")}
    assert judged(records(**broken))["bad"] == {}
    assert "no two nodes could reduce with each other: with n1: no NCCL" in capfd.readouterr().out


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


def test_thresholds_come_from_the_environment() -> None:
    found = read_preflight({"CTXLM_PREFLIGHT_MAX_CLOCK_S": "0.5", "CTXLM_PREFLIGHT": "1", "CTXLM_PREFLIGHT_MIB": ""})
    assert found == {**PREFLIGHT, "MAX_CLOCK_S": 0.5}
    for wrong in ("soon", "-1", "nan"):
        with pytest.raises(ConfigError, match=f"CTXLM_PREFLIGHT_LIMIT_S={wrong}: expected a number, 0 or more"):
            read_preflight({"CTXLM_PREFLIGHT_LIMIT_S": wrong})
    assert "did you mean CTXLM_PREFLIGHT_MIN_BANDWIDTH?" in misspelt({"CTXLM_PREFLIGHT_MIN_BANDWITH": "1"})[0]


def test_what_follows_from_bad_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context: Any = SimpleNamespace(
        run_dir=tmp_path, job_id="1", tasks={"n1": 2, "n2": 2, "n3": 2}, task_words=(),
        environ={"SLURM_JOB_PARTITION": "main"},
    )  # fmt: skip
    monkeypatch.setattr(slurm_commands, "job_exclusions", lambda job_id: ["n9"])
    monkeypatch.setattr(slurm_commands, "partition_nodes", lambda partition: [f"n{number}" for number in range(1, 6)])
    assert decide(context, {}, 3).srun_words == ()
    enough = decide(context, {"n1": "slow"}, 2)
    assert enough.srun_words == ("--nodes=2", "--ntasks=4", "--exclude=n1", "--ntasks-per-node=2")
    assert (enough.ended, enough.left_out, enough.exclude) == (None, ("n1",), ("n1", "n9"))
    replaced = decide(context, {"n1": "slow"}, 3).ended
    hopeless = decide(context, dict.fromkeys(["n1", "n2", "n3"], "x"), 3)
    assert replaced is not None and replaced.outcome is Outcome.STOPPED
    assert hopeless.ended is not None and hopeless.ended.outcome is Outcome.USER_ERROR
    assert "without n1, n2, n3, n9 partition main has 2 nodes, the job needs 3" in hopeless.ended.why


def test_excluded_nodes_are_remembered_with_their_first_reason(tmp_path: Path) -> None:
    assert slurm_commands.excluded_nodes(tmp_path) == {}
    slurm_commands.remember_excluded(tmp_path, {"n2": "slow"}, "job-1-0-0")
    slurm_commands.remember_excluded(tmp_path, {"n2": "excluded earlier: slow", "n3": "full"}, "job-1-1-0")
    assert slurm_commands.excluded_nodes(tmp_path) == {"n2": "slow", "n3": "full"}
    entry = json.loads((tmp_path / "excluded_nodes.json").read_text())["n3"]
    assert entry["attempt"] == "job-1-1-0" and abs(entry["time_unix_s"] - time.time()) < 60
    (tmp_path / "excluded_nodes.json").write_text("{ torn")
    assert slurm_commands.excluded_nodes(tmp_path) == {}


def test_words_for_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    uneven = {"n1": 1, "n2": 2, "n3": 3}
    assert slurm_commands.srun_words(uneven, ["n1", "n9"]) == ["--nodes=2", "--ntasks=5", "--exclude=n1"]
    assert slurm_commands.srun_words({"n1": 1}, ["n9"]) == []
    called: list[list[str]] = []
    monkeypatch.setattr(slurm_commands, "call", called.append)
    slurm_commands.requeue("7", [])
    slurm_commands.requeue("7", ["n2", "n1"])
    assert called[0] == ["scontrol", "requeue", "7"] and called[1][-2:] == ["7", "n1,n2"]
