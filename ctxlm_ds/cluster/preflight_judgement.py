"""Which nodes are bad, and why: what the ranks saw, against each other and against the limits of CTXLM_PREFLIGHT_*.

In: the ranks' records, the environment of slurm/env.sh. Out: reasons by node, warnings, a table. If nodes differ, most
of them are right; of two, the one that the batch script runs on. Needs the standard library only. Not here: collecting
records (preflight.py), making them (preflight_rank.py).
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ctxlm_ds.console import aligned
from ctxlm_ds.errors import ConfigError

Record = Mapping[str, Any]
GB = 1e9
FEW = 2
"""Nodes of which none can be told to be the odd one out."""
PREFIX = "CTXLM_PREFLIGHT_"
SCRATCH_VARIABLES = ("CTXLM_STAGE_DIR", "TMPDIR")


@dataclass(frozen=True)
class PreflightSettings:
    """One field a variable: `limit_s` is CTXLM_PREFLIGHT_LIMIT_S."""

    limit_s: float = 120.0
    """Seconds that a node has to answer. Network storage shows a new file only after up to a minute."""
    bandwidth: float = 1.0
    """0: no reductions are timed."""
    bandwidth_limit_s: float = 60.0
    """Seconds that one round of reductions may take, with the start of CUDA and NCCL."""
    mib: float = 64.0
    """Size of a reduction in MiB; less where the network is so slow that it would take longer than a second."""
    min_bandwidth: float = 0.5
    """A node is bad whose bandwidth is below this share of the nodes' median (three nodes or more)."""
    min_run_gb: float = 10.0
    """Free space in GB that a node must see at the run directory."""
    min_scratch_gb: float = 1.0
    """Free space in GB at a node's scratch folder."""
    max_clock_s: float = 2.0
    """A node is bad whose clock is further from the nodes' median (three nodes or more)."""
    min_nodes: float = 0.0
    """Fewest good nodes with which the job goes on at once; 0: all of its nodes, so that a bad one is replaced."""


def read_settings(environ: Mapping[str, str] | None = None) -> PreflightSettings:
    """The settings, checked.

    Raises:
        ConfigError: a variable is unknown or no number of its range; names all of them.
    """
    environ = os.environ if environ is None else environ
    known = {PREFIX + item.name.upper(): item.name for item in fields(PreflightSettings)}
    values: dict[str, float] = {}
    problems = []
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or not text.strip():
            continue
        if variable not in known:
            problems.append(f"{variable} is unknown; known are {', '.join(known)}")
            continue
        value = _number(text)
        if value is None:
            problems.append(f"{variable} is {text!r}, a number of 0 or more is expected")
        else:
            values[known[variable]] = value
    if values.get("min_bandwidth", 0.0) > 1:
        problems.append(f"{PREFIX}MIN_BANDWIDTH is {values['min_bandwidth']:g}, a share of the median (0 to 1)")
    if problems:
        raise ConfigError("slurm/env.sh: " + "; ".join(problems))
    return PreflightSettings(**values)


def scratch_folder(environ: Mapping[str, str]) -> Path:
    """The node-local folder that is checked: CTXLM_STAGE_DIR, else TMPDIR, else /tmp."""
    return Path(next((environ[name] for name in SCRATCH_VARIABLES if environ.get(name)), "/tmp"))


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


@dataclass
class Judgement:
    """What was found so far."""

    tasks: Mapping[str, int]
    """Tasks that each node of the allocation should have, in the order of the allocation."""
    home: str
    """The node of the batch script."""
    reasons: dict[str, list[str]] = field(default_factory=dict)
    """By bad node."""
    warnings: list[str] = field(default_factory=list)
    clock_s: dict[str, float] = field(default_factory=dict)
    """By node: what its clock shows more than the reference."""
    gb_per_s: dict[str, float] = field(default_factory=dict)
    """By node: its best bandwidth with another node."""

    def blame(self, node: str, why: str) -> None:
        """Add a reason against a node."""
        self.reasons.setdefault(node, []).append(why)

    def good(self) -> list[str]:
        """Nodes without a reason against them."""
        return [node for node in self.tasks if node not in self.reasons]

    def bad(self) -> dict[str, str]:
        """Reasons by bad node, in the order of the allocation."""
        return {node: "; ".join(self.reasons[node]) for node in self.tasks if node in self.reasons}


@dataclass(frozen=True)
class Evidence:
    """All records of a stage."""

    records: Mapping[tuple[str, int], Record]
    """By node and local rank."""
    seen_files: frozenset[str] = frozenset()
    """Nodes whose files appeared where the batch script runs."""

    def of(self, node: str) -> dict[int, Record]:
        """A node's records by local rank."""
        return {local: record for (name, local), record in self.records.items() if name == node}

    def first(self, node: str) -> Record:
        """The record of a node's first rank, which looks at more than the others; empty where there is none."""
        return self.records.get((node, 0), {})


def judge_local(judgement: Judgement, evidence: Evidence, settings: PreflightSettings) -> None:
    """Everything but bandwidth."""
    for node in judgement.good():
        _judge_presence(judgement, evidence, node, judgement.tasks[node], settings)
    for node in judgement.good():
        _judge_folders(judgement, evidence.first(node), node, settings)
    _judge_sharing(judgement, evidence)
    _judge_links(judgement, evidence)
    _judge_clocks(judgement, evidence, settings)
    _judge_likeness(judgement, evidence)


def _judge_presence(
    judgement: Judgement, evidence: Evidence, node: str, count: int, settings: PreflightSettings
) -> None:
    answered = len(evidence.of(node))
    if answered == 0:
        judgement.blame(node, f"no answer within {settings.limit_s:g} s")
    elif answered < count:
        judgement.blame(node, f"{answered} of {count} ranks answered within {settings.limit_s:g} s")
    elif node not in evidence.seen_files and not (evidence.first(node).get("run_dir") or {}).get("error"):
        judgement.blame(node, "what it writes into the run directory is not seen on " + judgement.home)


def _judge_folders(judgement: Judgement, record: Record, node: str, settings: PreflightSettings) -> None:
    limits = {"run_dir": ("run directory", settings.min_run_gb), "scratch": ("scratch", settings.min_scratch_gb)}
    for key, (name, least_gb) in limits.items():
        probe = record.get(key) or {}
        free_bytes = probe.get("free_bytes")
        if probe.get("error"):
            judgement.blame(node, f"{name} {probe['path']} cannot be written: {probe['error']}")
        elif free_bytes is not None and free_bytes < least_gb * GB:
            judgement.blame(node, f"{name} {probe['path']} has {free_bytes / GB:.2f} GB free, {least_gb:g} are needed")


def _judge_sharing(judgement: Judgement, evidence: Evidence) -> None:
    """A file of rank 0 that nobody else sees is rank 0's fault; one that somebody does not see is that one's."""
    good = judgement.good()
    writer = next((node for (node, _), record in evidence.records.items() if record.get("rank") == 0), None)
    others = [node for node in good if node != writer]
    blind = [node for node in others if not evidence.first(node).get("sees_shared_file")]
    if blind and len(blind) == len(others) and len(others) > 1:
        # Without rank 0 nobody has written the file.
        if writer in good:
            judgement.blame(writer, "what it writes into the run directory is not seen on the other nodes")
        return
    for node in blind if writer in good else []:
        judgement.blame(node, f"does not see what {writer} writes into the run directory")


def _judge_links(judgement: Judgement, evidence: Evidence) -> None:
    """One at a time, the node of which most links failed, and more than half; of equals, not the batch script's."""
    while True:
        errors, tried = _links(judgement, evidence)
        suspects = [node for node, failed in errors.items() if 2 * len(failed) > tried[node]]
        if not suspects:
            break
        worst = max(suspects, key=lambda node: (len(errors[node]), node != judgement.home))
        example = next(iter(errors[worst].values()))
        judgement.blame(worst, f"no exchange with {len(errors[worst])} of {tried[worst]} nodes ({example})")
    for node, failed in errors.items():
        judgement.warnings += [f"{node} did not reach {peer}: {error}" for peer, error in failed.items() if node < peer]


def _links(judgement: Judgement, evidence: Evidence) -> tuple[dict[str, dict[str, str]], dict[str, int]]:
    """By good node, the errors of its links with other good nodes by peer, and the number of links that were tried."""
    good = judgement.good()
    errors: dict[str, dict[str, str]] = {node: {} for node in good}
    tried: dict[str, set[str]] = {node: set() for node in good}
    for node in good:
        for peer, answer in (evidence.first(node).get("peers") or {}).items():
            if peer not in errors:
                continue
            tried[node].add(peer)
            tried[peer].add(node)
            if "error" in answer:
                errors[node].setdefault(peer, f"{node} to {answer['error']}")
                errors[peer].setdefault(node, f"{node} to {answer['error']}")
    return errors, {node: len(peers) for node, peers in tried.items()}


def _judge_clocks(judgement: Judgement, evidence: Evidence, settings: PreflightSettings) -> None:
    """Against the median of all; of two nodes, against the batch script's."""
    first = next(iter(judgement.tasks))
    offsets = {first: 0.0}
    for node in judgement.good():
        answer = (evidence.first(node).get("peers") or {}).get(first) or {}
        if "offset_s" in answer:
            offsets[node] = -float(answer["offset_s"])
    if len(offsets) < FEW or first not in judgement.good():
        return
    few = len(offsets) == FEW and judgement.home in offsets
    reference_s = offsets[judgement.home] if few else statistics.median(offsets.values())
    judgement.clock_s.update({node: offset_s - reference_s for node, offset_s in offsets.items()})
    for node, offset_s in judgement.clock_s.items():
        if abs(offset_s) > settings.max_clock_s:
            whose = f"{judgement.home}'s" if few else "the nodes' median"
            judgement.blame(node, f"its clock is {offset_s:+.2f} s from {whose} ({settings.max_clock_s:g} s allowed)")


def _judge_likeness(judgement: Judgement, evidence: Evidence) -> None:
    """Versions and numbers of GPUs: most nodes are right."""
    good = judgement.good()
    facts: dict[str, dict[str, Any]] = {}
    for node in good:
        record = evidence.first(node)
        facts[node] = {
            **(record.get("versions") or {}),
            "GPUs by nvidia-smi": record.get("gpus_present"),
            "GPUs of a rank": tuple(sorted({str(one.get("gpus")) for one in evidence.of(node).values()})),
        }
    for name in dict.fromkeys(key for fact in facts.values() for key in fact):
        usual = _usual({node: fact.get(name) for node, fact in facts.items()}, judgement.home)
        for node in good:
            own = facts[node].get(name)
            if own != usual:
                judgement.blame(node, f"{name}: {_shown(own)}, elsewhere {_shown(usual)}")


def _usual(values: Mapping[str, Any], home: str) -> Any:
    """The most frequent value; of equals, the batch script's node's."""
    counts = Counter(values.values())
    return max(counts, key=lambda value: (counts[value], values.get(home) == value)) if counts else None


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " and ".join(value)
    return "none" if value is None else str(value)


def judge_bandwidth(judgement: Judgement, evidence: Evidence, settings: PreflightSettings) -> None:
    """Reductions within each node, then between nodes, then over all."""
    for node in judgement.good():
        errors = _errors(evidence, node, "node")
        if errors:
            judgement.blame(node, f"a reduction among its own ranks failed: {errors[0]}")
    _judge_slow(judgement, _node_figures(evidence, judgement.good(), "node"), "among its own ranks", settings)
    _judge_pairs(judgement, evidence, settings)
    if judgement.reasons:
        return
    failed = [error for node in judgement.good() for error in _errors(evidence, node, "all")]
    if failed:
        judgement.warnings.append(f"a reduction over all ranks failed: {failed[0]}")


def _judge_pairs(judgement: Judgement, evidence: Evidence, settings: PreflightSettings) -> None:
    good = judgement.good()
    figures = _node_figures(evidence, good, "pair")
    silent = [node for node in good if node not in figures and len(judgement.tasks) > 1]
    if silent and len(silent) == len(good):
        first = next(iter([error for node in good for error in _errors(evidence, node, "pair")]), "no answer")
        judgement.warnings.append(f"no two nodes could reduce with each other: {first}")
        return
    for node in silent:
        errors = _errors(evidence, node, "pair") or ["no answer"]
        judgement.blame(node, f"no reduction with another node worked: {errors[0]}")
    judgement.gb_per_s.update(figures)
    _judge_slow(judgement, figures, "with other nodes", settings)


def _judge_slow(
    judgement: Judgement, figures: Mapping[str, float], where: str, settings: PreflightSettings
) -> None:
    if len(figures) <= FEW:
        return
    usual = statistics.median(figures.values())
    for node, figure in figures.items():
        if figure < settings.min_bandwidth * usual:
            judgement.blame(
                node, f"reductions {where} at {figure:.3g} GB/s, the nodes' median is {usual:.3g} "
                f"({settings.min_bandwidth:g} of it is asked for)"
            )  # fmt: skip


def _rounds(evidence: Evidence, node: str, kind: str) -> Iterable[tuple[int, Mapping[str, Any]]]:
    for local, record in evidence.of(node).items():
        for round_ in record.get("rounds") or []:
            if round_["kind"] == kind:
                yield local, round_


def _errors(evidence: Evidence, node: str, kind: str) -> list[str]:
    return [f"with {r['name']}: {r['error']}" for _, r in _rounds(evidence, node, kind) if "error" in r]


def _node_figures(evidence: Evidence, nodes: Sequence[str], kind: str) -> dict[str, float]:
    """GB/s of a node with its best partner: its slowest rank's, for that one decides, times the ranks at work."""
    figures: dict[str, float] = {}
    for node in nodes:
        by_partner: dict[str, list[float]] = {}
        failed = set()
        for _, round_ in _rounds(evidence, node, kind):
            if "error" in round_:
                failed.add(round_["name"])
            elif round_["gb_per_s"] is not None:
                by_partner.setdefault(round_["name"], []).append(float(round_["gb_per_s"]))
        whole = [min(values) * len(values) for name, values in by_partner.items() if name not in failed]
        if whole:
            figures[node] = max(whole)
    return figures


def over_all_gb_per_s(evidence: Evidence) -> float | None:
    """GB/s of the reduction over all ranks: the slowest rank's; None where it was not measured on all."""
    figures = [r.get("gb_per_s") for node, _ in evidence.records for _, r in _rounds(evidence, node, "all")]
    return min(figures) if figures and None not in figures else None  # type: ignore[type-var]


def table_lines(judgement: Judgement, local: Evidence) -> list[str]:
    """A line a node."""
    rows = [["node", "ranks", "GPUs", "run dir", "scratch", "clock", "GB/s", "verdict"]]
    for node, count in judgement.tasks.items():
        record = local.first(node)
        clock_s, speed = judgement.clock_s.get(node), judgement.gb_per_s.get(node)
        rows.append([
            node, f"{len(local.of(node))}/{count}", _count(record.get("gpus_present")), _free(record, "run_dir"),
            _free(record, "scratch"), "-" if clock_s is None else f"{1000 * clock_s:+.1f} ms",
            "-" if speed is None else f"{speed:.3g}", "BAD" if node in judgement.reasons else "ok",
        ])  # fmt: skip
    return aligned(rows, left=range(len(rows[0])))


def _count(value: Any) -> str:
    return "-" if value is None else str(value)


def _free(record: Record, key: str) -> str:
    free_bytes = (record.get(key) or {}).get("free_bytes")
    return "-" if free_bytes is None else f"{free_bytes / GB:.1f} GB"
