"""Checks an allocation before training, names bad nodes with the reason, and decides how the job continues.

Out: Prepared; RUN/attempts/ATTEMPT/preflight/report.json; RUN/excluded_nodes.json. One step of srun runs
preflight_rank.py on all nodes; a node that hangs or is cut off is named when its time is up.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ctxlm_ds.apps.cluster import slurm_commands
from ctxlm_ds.apps.cluster.job_context import JobContext, log
from ctxlm_ds.apps.cluster.preflight_rank import MOST_TURNS
from ctxlm_ds.apps.cluster.restart_policy import Ended, Outcome, Prepared
from ctxlm_ds.apps.cluster.settings import read_preflight
from ctxlm_ds.apps.cluster.srun import run_on_nodes
from ctxlm_ds.atomic import write_text
from ctxlm_ds.errors import EXIT_USER_ERROR, ClusterError
from ctxlm_ds.process.run_history import ATTEMPTS_DIR

START_S = 60.0
FEW = 2  # nodes, of which none can be called the slow one
QUIET = {
    "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}  # fmt: skip
_REFUSAL = re.compile(r"error: .*\bnode (\S+?): .*")
Ranks = dict[str, dict[int, dict[str, Any]]]  # records by node and local rank


def run_preflight(
    context: JobContext, attempt: str, environ: Mapping[str, str], should_stop: Callable[[], bool]
) -> Prepared:
    """Check the nodes, log the results, and decide. Raises ClusterError if srun can start a task on no node."""
    settings, file = read_preflight(environ), context.run_dir / slurm_commands.EXCLUDED_NAME
    folder = context.run_dir / ATTEMPTS_DIR / attempt / "preflight"
    with contextlib.suppress(OSError):  # the job must survive a bad disk
        write_text(folder / "token", "every node must see this\n")
    known = slurm_commands.excluded_nodes(context.run_dir)
    bad = {node: f"excluded earlier: {known[node]} ({file})" for node in context.tasks if node in known}
    found: dict[str, Any] = {}
    least = int(settings["MIN_NODES"]) or len(context.tasks)
    # Twice, because one node on which srun can start nothing ends the step everywhere.
    for _ in range(2):
        tasks = {node: count for node, count in context.tasks.items() if node not in bad}
        if len(tasks) < least or not tasks:
            break
        log(f"preflight: {len(tasks)} nodes, {sum(tasks.values())} tasks")
        words = [str(context.run_dir), str(folder / "token")]
        records, output = run_on_nodes(
            "ctxlm_ds.apps.cluster.preflight_rank", words, tasks, context.settings, {**environ, **QUIET},
            START_S + settings["LIMIT_S"] + sum(range(MOST_TURNS + 1)) * settings["BANDWIDTH_LIMIT_S"], should_stop,
        )  # fmt: skip
        if should_stop():
            return Prepared(Ended(Outcome.STOPPED, "a signal came during the preflight", 0))
        with contextlib.suppress(OSError):
            write_text(folder / "output.log", "\n".join(output) + "\n")
        refused = {m[1]: m[0] for m in map(_REFUSAL.search, output) if m and m[1] in tasks}
        if len(refused) == len(tasks) or not (refused or records):
            raise ClusterError(f"srun cannot start a task on any node: {(output or ['no answer'])[-1]}")
        if not refused:
            found = judge(tasks, records, settings)
            bad.update(found["bad"])
            break
        bad.update({node: f"srun cannot start a task on it: {why}" for node, why in refused.items()})
    for node, why in bad.items():
        log(f"preflight: {node} is bad: {why}")
    prepared = decide(context, bad, least)
    with contextlib.suppress(OSError):
        write_text(folder / "report.json", json.dumps({**found, "bad": bad, "exclude": prepared.exclude}, indent=1))
        slurm_commands.remember_excluded(context.run_dir, bad, attempt)
    return prepared


def decide(context: JobContext, bad: Mapping[str, str], least: int) -> Prepared:
    """Continue with the good nodes if they are enough, else request others if the partition has enough of them."""
    tasks, partition = context.tasks, context.environ.get("SLURM_JOB_PARTITION")
    if not bad:
        return Prepared(srun_words=context.task_words)
    known = slurm_commands.excluded_nodes(context.run_dir)
    exclude = tuple(sorted({*bad, *known, *slurm_commands.job_exclusions(context.job_id)}))
    names, num_good = ", ".join(bad), len(tasks) - len(bad)
    if num_good >= max(1, least):
        log(f"continuing with {num_good} of {len(tasks)} nodes, without {names}")
        return Prepared(None, exclude, tuple(bad), tuple(slurm_commands.srun_words(tasks, bad)))
    num_others = len([node for node in slurm_commands.partition_nodes(partition) if node not in exclude])
    if num_others >= len(tasks):
        return Prepared(Ended(Outcome.STOPPED, f"{names} cannot be used; asking Slurm for other nodes", 0), exclude)
    why = (
        f"{names} cannot be used, and without {', '.join(exclude)} partition {partition} has {num_others} nodes, "
        f"the job needs {len(tasks)}; repair them and remove {context.run_dir / slurm_commands.EXCLUDED_NAME}, submit "
        "with fewer nodes, or set CTXLM_PREFLIGHT_MIN_NODES in slurm/env.sh to continue with fewer"
    )
    return Prepared(Ended(Outcome.USER_ERROR, why, EXIT_USER_ERROR), exclude)


def judge(tasks: Mapping[str, int], records: list[dict[str, Any]], settings: Mapping[str, float]) -> dict[str, Any]:
    """Collect each node's faults and compare it with the others; return `bad`, the reasons by node, and figures."""
    ranks: Ranks = {node: {} for node in tasks}
    clock_s: dict[str, float] = {}
    for record in records:
        node, offset_s = record["node"], record["sent_unix_s"] - record["received_unix_s"]
        clock_s[node] = max(offset_s, clock_s.get(node, offset_s))  # of the quickest line
        ranks[node][record["local_rank"]] = record
    reasons = {node: [fault for record in own.values() for fault in record["faults"]] for node, own in ranks.items()}
    for node, own in ranks.items():
        if len(own) < tasks[node] or "gpus" not in own[0]:
            reasons[node].append(f"{len(own)} of {tasks[node]} ranks answered within {settings['LIMIT_S']:g} s")
    good = [node for node in tasks if not reasons[node]]
    # Of two clocks the first is taken to be right.
    usual_s = statistics.median(clock_s[node] for node in (good if len(good) > FEW else good[:1] or clock_s))
    clock_s = {node: offset_s - usual_s for node, offset_s in clock_s.items()}
    usual_gpus = Counter(ranks[node][0]["gpus"] for node in good).most_common(1)
    for node in good:
        gpus = ranks[node][0]["gpus"]
        if abs(clock_s[node]) > settings["MAX_CLOCK_S"]:
            reasons[node].append(
                f"its clock is {clock_s[node]:+.2f} s from the nodes' median ({settings['MAX_CLOCK_S']:g} s allowed)"
            )
        if gpus != usual_gpus[0][0]:
            reasons[node].append(f"GPUs: {gpus}, elsewhere {usual_gpus[0][0]}")
    for within in (True, False):
        speeds = speeds_of({node: ranks[node] for node in good}, within)
        for node, why in _slow_nodes(speeds, ranks, within, settings["MIN_BANDWIDTH"]):
            reasons[node].append(why)
    for node, own in ranks.items():
        free = ", ".join(f"{name} {free_gb:.3g} GB" for name, free_gb in own.get(0, {}).get("free_gb", {}).items())
        figures = f"clock {clock_s[node]:+.3f} s" if node in clock_s else "no answer"
        figures += f"; {speeds[node]:.3g} GB/s" if node in speeds else ""
        log(f"preflight: {node}: GPUs {own.get(0, {}).get('gpus')}; {free}; {figures}")
    bad = {node: "; ".join(why) for node, why in reasons.items() if why}
    return {"bad": bad, "clock_s": clock_s, "gb_per_s": speeds, "ranks": ranks}


def speeds_of(ranks: Ranks, within: bool) -> dict[str, float]:
    """Return each node's GB/s among its own ranks, or with its better neighbour: the slowest rank's, or 0."""
    speeds: dict[str, float] = {}
    for node, own in ranks.items():
        by_partner: dict[str, list[float]] = {}
        for record in own.values():
            for partner, speed in [*record["gb_per_s"].items(), *((partner, 0.0) for partner in record["errors"])]:
                if (partner == node) == within:
                    by_partner.setdefault(partner, []).append(speed)
        if by_partner:
            speeds[node] = max(map(min, by_partner.values()))
    return speeds


def _slow_nodes(speeds: Mapping[str, float], ranks: Ranks, within: bool, share: float) -> Iterator[tuple[str, str]]:
    words = "among its own ranks" if within else "with other nodes"
    usual = statistics.median(speeds.values()) if len(speeds) > FEW else 0.0
    for node, speed in speeds.items():
        errors = [e for own in ranks[node].values() for p, e in own["errors"].items() if (p == node) == within]
        if speed == 0 and not within and not any(speeds.values()):
            log(f"preflight: warning: {node}: no two nodes could reduce with each other: {errors[0]}")
        elif speed == 0:
            yield node, f"no reduction {words} worked: {errors[0]}"
        elif speed < share * usual:
            bound = f"the nodes' median is {usual:.3g} ({share:g} of it is asked for)"
            yield node, f"reductions {words} at {speed:.3g} GB/s, {bound}"
