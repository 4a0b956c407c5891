"""What a preflight concludes from what the ranks saw, and what it asks of Slurm."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.cluster import exclusions
from ctxlm_ds.cluster.preflight import PreflightJob, decide
from ctxlm_ds.cluster.preflight_judgement import (
    Evidence,
    Judgement,
    PreflightSettings,
    judge_bandwidth,
    judge_local,
    over_all_gb_per_s,
    read_settings,
    scratch_folder,
    table_lines,
)
from ctxlm_ds.cluster.preflight_network import ClockServer, measure_clock, node_ranks, pairings, rounds_of
from ctxlm_ds.cluster.preflight_rank import peers_of, probe_folder, versions
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.process.slurm import SlurmTask

NODES = ("n1", "n2", "n3", "n4")
SETTINGS = PreflightSettings()


def a_record(node: str, rank: int, local_rank: int = 0, nodes: tuple[str, ...] = NODES, **changes: Any) -> Any:
    """What a good rank says."""
    room = {"path": "/x", "free_bytes": 50e9, "error": None}
    peers = {peer: {"round_trip_s": 1e-4, "offset_s": 0.0} for peer in nodes if peer != node}
    first = {
        "run_dir": room, "scratch": room, "gpus_present": 2, "sees_shared_file": True, "peers": peers, "asked_all": True
    } if local_rank == 0 else {}  # fmt: skip
    return {
        "node": node, "rank": rank, "local_rank": local_rank, "gpus": 1,
        "versions": {"python": "3.11.7", "torch": "2.13.0"}, **first, **changes,
    }  # fmt: skip


def an_evidence(nodes: tuple[str, ...] = NODES, unseen: tuple[str, ...] = (), **changes: dict[str, Any]) -> Evidence:
    """Two ranks a node; `changes` by node, for its first rank."""
    records = {}
    for index, node in enumerate(nodes):
        records[(node, 0)] = a_record(node, 2 * index, 0, nodes, **changes.get(node, {}))
        records[(node, 1)] = a_record(node, 2 * index + 1, 1, nodes)
    return Evidence(records, frozenset(nodes) - frozenset(unseen))


def judged(evidence: Evidence, nodes: tuple[str, ...] = NODES, settings: PreflightSettings = SETTINGS) -> Judgement:
    judgement = Judgement(dict.fromkeys(nodes, 2), nodes[0])
    judge_local(judgement, evidence, settings)
    return judgement


def test_good_nodes_stay_good() -> None:
    found = judged(an_evidence())
    assert found.bad() == {}
    assert found.warnings == []
    assert len(table_lines(found, an_evidence())) == 5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run_dir": {"path": "/r", "free_bytes": 1e9, "error": None}}, "run directory /r has 1.00 GB free, 10 are"),
        ({"scratch": {"path": "/s", "free_bytes": None, "error": "Read-only file system"}}, "/s cannot be written"),
        ({"sees_shared_file": False, "peers": {}}, "does not see what n1 writes"),
        ({"versions": {"python": "3.11.7", "torch": "2.12.0"}}, "torch: 2.12.0, elsewhere 2.13.0"),
        ({"gpus_present": 1}, "GPUs by nvidia-smi: 1, elsewhere 2"),
        ({"peers": {n: {"error": f"{n}: timed out"} for n in ("n1", "n2", "n4")}}, "no exchange with 3 of 3 nodes"),
        ({"peers": {n: {"round_trip_s": 1e-4, "offset_s": -9.0} for n in ("n1", "n2")}}, "its clock is +9.00 s"),
    ],
)
def test_the_odd_node_is_named(change: dict[str, Any], reason: str) -> None:
    bad = judged(an_evidence(n3=change)).bad()
    assert list(bad) == ["n3"]
    assert reason in bad["n3"]


def test_missing_ranks_and_unseen_files_are_named() -> None:
    whole = an_evidence(unseen=("n4",))
    records = {key: record for key, record in whole.records.items() if key not in (("n2", 0), ("n2", 1), ("n3", 1))}
    bad = judged(Evidence(records, whole.seen_files)).bad()
    assert bad == {
        "n2": "no answer within 120 s", "n3": "1 of 2 ranks answered within 120 s",
        "n4": "what it writes into the run directory is not seen on n1",
    }  # fmt: skip


def test_a_first_node_that_nobody_sees_is_the_bad_one() -> None:
    blind = {"sees_shared_file": False, "peers": {}}
    assert list(judged(an_evidence(n2=blind, n3=blind, n4=blind)).bad()) == ["n1"]


def test_a_first_node_whose_clock_is_wrong_is_the_bad_one() -> None:
    off = {"peers": {"n1": {"round_trip_s": 1e-4, "offset_s": 7.0}}}
    found = judged(an_evidence(n2=off, n3=off, n4=off))
    assert list(found.bad()) == ["n1"]
    assert found.clock_s["n1"] == pytest.approx(7.0)


def test_of_two_nodes_the_batch_scripts_is_right() -> None:
    two = NODES[:2]
    silent = {"peers": {"n1": {"error": "n1: timed out"}}}
    assert list(judged(an_evidence(two, n2=silent), two).bad()) == ["n2"]
    older = {"versions": {"python": "3.11.7", "torch": "2.12.0"}}
    assert list(judged(an_evidence(two, n1=older), two).bad()) == ["n2"]


def test_one_failed_link_of_many_is_a_warning() -> None:
    peers = {**a_record("n2", 2)["peers"], "n4": {"error": "n4: timed out"}}
    found = judged(an_evidence(n2={"peers": peers}))
    assert found.bad() == {}
    assert found.warnings == ["n2 did not reach n4: n2 to n4: timed out"]


def measured(speeds: dict[tuple[str, str], float | str]) -> Evidence:
    """Pair rounds between three nodes with two ranks each: a bandwidth, or an error."""
    records = {}
    for index, node in enumerate(NODES[:3]):
        rounds = []
        for pair, speed in speeds.items():
            if node in pair:
                partner = pair[1 - pair.index(node)]
                result = {"error": speed} if isinstance(speed, str) else {"gb_per_s": speed}
                rounds.append({"name": partner, "kind": "pair", **result})
        rounds.append({"name": "all", "kind": "all", "gb_per_s": 3.0})
        for local in (0, 1):
            records[(node, local)] = {"node": node, "rank": 2 * index + local, "local_rank": local, "rounds": rounds}
    return Evidence(records)


def test_pairs_tell_which_node_is_slow() -> None:
    found = Judgement(dict.fromkeys(NODES[:3], 2), "n1")
    evidence = measured({("n1", "n2"): 10.0, ("n1", "n3"): 2.0, ("n2", "n3"): 2.0})
    judge_bandwidth(found, evidence, SETTINGS)
    assert list(found.bad()) == ["n3"]
    assert "at 4 GB/s, the nodes' median is 20" in found.bad()["n3"]
    assert over_all_gb_per_s(evidence) == 3.0


def test_a_node_with_which_no_reduction_works_is_named() -> None:
    found = Judgement(dict.fromkeys(NODES[:3], 2), "n1")
    judge_bandwidth(found, measured({("n1", "n2"): 10.0, ("n1", "n3"): "hung", ("n2", "n3"): "hung"}), SETTINGS)
    assert list(found.bad()) == ["n3"]
    nothing = Judgement(dict.fromkeys(NODES[:3], 2), "n1")
    judge_bandwidth(nothing, measured(dict.fromkeys([("n1", "n2"), ("n1", "n3"), ("n2", "n3")], "no NCCL")), SETTINGS)
    assert nothing.bad() == {}
    assert "no two nodes could reduce with each other: with n2: no NCCL" in nothing.warnings


def test_a_clock_is_compared_by_round_trips() -> None:
    server = ClockServer(clock=lambda: time.time() + 30.0)
    try:
        trip = measure_clock("127.0.0.1", server.port, timeout_s=30)
    finally:
        server.close()
    assert trip.offset_s == pytest.approx(30.0, abs=trip.round_trip_s + 0.001)


def test_a_port_that_nobody_answers_at_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(OSError, match="timed out"):
        measure_clock("127.0.0.1", listener.getsockname()[1], timeout_s=0.2)


def test_a_folder_is_really_written_to(tmp_path: Path) -> None:
    found = probe_folder(tmp_path / "new")
    assert found["error"] is None
    assert found["free_bytes"] > 0
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    assert probe_folder(tmp_path / "file")["error"] == "File exists"


def test_versions_come_from_what_is_installed() -> None:
    assert versions()["torch"].startswith("2.")


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16, 100])
def test_every_node_asks_and_is_asked(count: int) -> None:
    asked = {peer for index in range(count) for peer in peers_of(index, count)}
    assert asked == set(range(count))
    assert all(index not in peers_of(index, count) for index in range(count))
    assert max(len(peers_of(index, count)) for index in range(count)) <= count.bit_length() + 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 33])
def test_pairs_are_disjoint_and_no_node_is_left_without(count: int) -> None:
    rounds = pairings(count)
    assert len(rounds) <= 5
    for pairs in rounds:
        members = [node for pair in pairs for node in pair]
        assert len(members) == len(set(members)) >= 2 * (count // 2)
    pairs_made = [pair for pairs in rounds for pair in pairs]
    assert len(pairs_made) == len(set(pairs_made))
    if count > 1:
        assert {node for pair in pairs_made for node in pair} == set(range(count))


def test_both_nodes_of_a_pair_meet_in_the_same_round() -> None:
    hosts = ("n1", "n2", "n3", "n4", "n5")
    tasks = [SlurmTask(rank, 10, rank % 2, 2, hosts, 15000) for rank in range(10)]
    everyone = {task.rank: rounds_of(task, node_ranks(task)) for task in tasks}
    for own in everyone.values():
        for round_ in own:
            if round_.kind == "pair":
                assert round_.groups == tuple(zip(round_.ranks[:2], round_.ranks[2:], strict=True))
            for member in round_.ranks:
                assert [r for r in everyone[member] if r.port == round_.port and r.ranks == round_.ranks]


def test_thresholds_come_from_the_environment() -> None:
    found = read_settings({"CTXLM_PREFLIGHT_MAX_CLOCK_S": "0.5", "CTXLM_PREFLIGHT": "1", "CTXLM_PREFLIGHT_MIB": ""})
    assert found == PreflightSettings(max_clock_s=0.5)
    with pytest.raises(ConfigError, match="LIMIT_S is 'soon'.*MIN_BANDWITH is unknown"):
        read_settings({"CTXLM_PREFLIGHT_MIN_BANDWITH": "1", "CTXLM_PREFLIGHT_LIMIT_S": "soon"})
    with pytest.raises(ConfigError, match="a share of the median"):
        read_settings({"CTXLM_PREFLIGHT_MIN_BANDWIDTH": "50"})
    assert scratch_folder({"TMPDIR": "/a", "CTXLM_STAGE_DIR": "/b"}) == Path("/b")
    assert scratch_folder({}) == Path("/tmp")


def a_job(run_dir: Path) -> PreflightJob:
    return PreflightJob(run_dir, "job-1-0-0", {"n1": 2, "n2": 2, "n3": 2}, job_id="1")


def test_enough_good_nodes_go_on_at_once(tmp_path: Path) -> None:
    outcome = decide(a_job(tmp_path), {"n1": "slow"}, PreflightSettings(min_nodes=2))
    assert outcome.action == "go"
    assert outcome.srun_words == ("--nodes=2", "--ntasks=4", "--exclude=n1", "--ntasks-per-node=2")
    assert decide(a_job(tmp_path), {}, SETTINGS).srun_words == ()


def test_excluded_nodes_are_remembered_with_their_first_reason(tmp_path: Path) -> None:
    assert exclusions.excluded_nodes(tmp_path) == {}
    exclusions.remember_excluded(tmp_path, {"n2": "slow"}, "job-1-0-0")
    exclusions.remember_excluded(tmp_path, {"n2": "excluded earlier: slow", "n3": "full"}, "job-1-1-0")
    assert exclusions.excluded_nodes(tmp_path) == {"n2": "slow", "n3": "full"}
    assert json.loads((tmp_path / "excluded_nodes.json").read_text())["n3"]["attempt"] == "job-1-1-0"
    (tmp_path / "excluded_nodes.json").write_text("{ torn")
    assert exclusions.excluded_nodes(tmp_path) == {}


def test_words_for_slurm() -> None:
    assert exclusions.sbatch_words(["n3", "n1", "n3"]) == ["--exclude=n1,n3"]
    assert exclusions.sbatch_words([]) == []
    uneven = {"n1": 1, "n2": 2, "n3": 3}
    assert exclusions.srun_words(uneven, ["n1", "n9"]) == ["--nodes=2", "--ntasks=5", "--exclude=n1"]
    assert exclusions.srun_words({"n1": 1}, ["n9"]) == []
    assert exclusions.requeue_command(7, []) == ["scontrol", "requeue", "7"]
    assert exclusions.requeue_command(7, ["n2", "n1"])[-2:] == ["7", "n1,n2"]
