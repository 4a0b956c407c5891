"""What a preflight concludes from what the ranks saw, and what it asks of Slurm."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctxlm_ds.apps.cluster import slurm_commands
from ctxlm_ds.apps.cluster.preflight import decide, judge
from ctxlm_ds.apps.cluster.restart_policy import Outcome
from ctxlm_ds.apps.cluster.settings import PREFLIGHT

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
