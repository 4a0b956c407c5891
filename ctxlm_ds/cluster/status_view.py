"""The status of runs as text: a table of several, everything about one.

In: RunStatus. Out: lines. Not here: finding it out (status.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from ctxlm_ds.cluster.status import RunStatus
from ctxlm_ds.console import aligned, counted, format_duration

HEADINGS = ("run", "state", "step", "loss", "tokens/s", "left", "checkpoint", "restarts", "skipped", "job")
UNKNOWN = "-"


def cells(status: RunStatus) -> dict[str, str]:
    """Return a run's row of the table by heading."""
    speed, last = status.tokens_per_second, "" if status.max_steps is None else f"/{status.max_steps}"
    return {
        "run": status.run,
        "state": status.state,
        "step": _metric(status, None if status.step is None else f"{status.step}{last}"),
        "loss": _metric(status, None if status.loss is None else f"{status.loss:.4f}"),
        "tokens/s": _metric(status, None if speed is None else f"{speed:,.0f}"),
        "left": UNKNOWN if status.eta_s is None else format_duration(status.eta_s),
        "checkpoint": checkpoint_cell(status),
        "restarts": str(status.restarts),
        "skipped": f"{status.skips}, {status.rollbacks} back" if status.rollbacks else str(status.skips),
        "job": status.job_id or UNKNOWN,
    }


def _metric(status: RunStatus, text: str | None) -> str:
    why = status.damaged.get("metrics.jsonl")
    if why is not None:
        return "damaged" if why == "damaged" else "unreadable"
    return UNKNOWN if text is None else text


def checkpoint_cell(status: RunStatus) -> str:
    """Return `12, 3:20 ago`, or what is wrong with the checkpoint."""
    if "checkpoints" in status.damaged:
        return status.damaged["checkpoints"]
    if status.checkpoint_step is None:
        return UNKNOWN
    if status.checkpoint_problem is not None:
        return f"{status.checkpoint_step}, damaged"
    return f"{status.checkpoint_step}, {format_duration(status.checkpoint_age_s or 0)} ago"


def table(statuses: Sequence[RunStatus]) -> list[str]:
    """Return aligned lines, headings first."""
    return aligned([HEADINGS, *(list(cells(status).values()) for status in statuses)], left=(0, 1), indent="")


def remarks(statuses: Sequence[RunStatus]) -> list[str]:
    """Return what does not fit into a table: why a run is not running, how its last start ended, what is damaged."""
    lines = []
    for status in statuses:
        facts = [f"{status.state}: {status.why}"] if status.why and status.state != "completed" else []
        if status.ends and status.state in ("running", "starting", "restarting"):
            facts.append(f"the previous start: {status.ends[-1]}")
        lines += [f"{status.run}: {fact}" for fact in [*facts, *_trouble(status)]]
    return lines


def _trouble(status: RunStatus) -> list[str]:
    facts = [f"{name} is {why}" for name, why in status.damaged.items()]
    if status.checkpoint_problem is not None:
        facts.append(status.checkpoint_problem)
    if status.failed_saves:
        facts.append(f"{counted(status.failed_saves, 'checkpoint')} could not be written")
    return facts


def details(status: RunStatus) -> list[str]:
    """Return everything about one run, a fact per line."""
    if status.state == "no such folder":
        return [f"{status.run}: no such folder; give a run directory such as runs/NAME, or a folder of runs"]
    pairs = [(name, text) for name, text in cells(status).items() if name != "run"]
    if status.why:
        pairs.insert(1, ("why", status.why))
    if status.log:
        pairs.append(("log", status.log))
    width = max(len(name) for name, _ in pairs)
    lines = [status.run, *(f"  {name.ljust(width)}  {text}" for name, text in pairs)]
    lines += [f"  {fact}" for fact in _trouble(status)]
    if status.ends:
        lines.append("  how its starts ended:")
        lines += [f"    {number}. {end}" for number, end in enumerate(status.ends, 1)]
    return lines
