"""The status of runs as text: a table of several, all that is known of one.

In: RunStatus. Out: lines, or a rich table on a terminal. Not here: finding it out (status.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ctxlm_ds.cluster.status import RunStatus
from ctxlm_ds.console import aligned, counted, format_duration

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS = ("run", "state", "step", "loss", "tokens/s", "left", "checkpoint", "restarts", "skipped", "job")
TEXT_COLUMNS = ("run", "state")
LEAST_NEEDED = ("job", "skipped", "tokens/s", "restarts", "left")
"""Left out in this order where a terminal is narrow."""
RICH_GAP_CHARACTERS = 2
UNKNOWN = "-"
STYLES = {
    "running": "green", "starting": "green", "completed": "bold green", "queued": "yellow", "restarting": "yellow",
    "failed": "bold red", "stale": "bold red", "no such folder": "red",
}  # fmt: skip


def cells(status: RunStatus) -> dict[str, str]:
    """One line of the table, by heading."""
    return {
        "run": status.run,
        "state": status.state,
        "step": step_cell(status),
        "loss": _cell(status, "metrics.jsonl", None if status.loss is None else f"{status.loss:.4f}"),
        "tokens/s": _cell(
            status, "metrics.jsonl", None if status.tokens_per_second is None else f"{status.tokens_per_second:,.0f}"
        ),
        "left": UNKNOWN if status.eta_s is None else format_duration(status.eta_s),
        "checkpoint": checkpoint_cell(status),
        "restarts": str(status.restarts),
        "skipped": skipped_cell(status),
        "job": status.job_id or UNKNOWN,
    }


def step_cell(status: RunStatus) -> str:
    """`12/100`."""
    last = "" if status.max_steps is None else f"/{status.max_steps}"
    return _cell(status, "metrics.jsonl", None if status.step is None else f"{status.step}{last}")


def checkpoint_cell(status: RunStatus) -> str:
    """`12, 3:20 ago`, or what is wrong with it."""
    if "checkpoints" in status.damaged:
        return status.damaged["checkpoints"]
    if status.checkpoint_step is None:
        return UNKNOWN
    if status.checkpoint_problem is not None:
        return f"{status.checkpoint_step}, damaged"
    return f"{status.checkpoint_step}, {format_duration(status.checkpoint_age_s or 0)} ago"


def skipped_cell(status: RunStatus) -> str:
    """Batches passed over, and how often the run went back."""
    return f"{status.skips}, {status.rollbacks} back" if status.rollbacks else str(status.skips)


def _cell(status: RunStatus, file: str, text: str | None) -> str:
    if file in status.damaged:
        return "damaged" if status.damaged[file] == "damaged" else "unreadable"
    return UNKNOWN if text is None else text


def plain_table(statuses: Sequence[RunStatus]) -> list[str]:
    """Aligned lines, headings first: names to the left, figures to the right."""
    rows = [HEADINGS, *(tuple(cells(status).values()) for status in statuses)]
    return aligned(rows, left=range(len(TEXT_COLUMNS)), indent="")


def headings_that_fit(statuses: Sequence[RunStatus], width: int) -> list[str]:
    """The columns that a terminal of `width` characters can show."""
    rows = [cells(status) for status in statuses]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) + RICH_GAP_CHARACTERS for name in HEADINGS}
    shown = list(HEADINGS)
    for name in LEAST_NEEDED:
        if sum(widths[kept] for kept in shown) + RICH_GAP_CHARACTERS > width:
            shown.remove(name)
    return shown


def rich_table(statuses: Sequence[RunStatus], width: int) -> Table:
    """The same for a terminal of `width` characters."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    shown = headings_that_fit(statuses, width)
    for heading in shown:
        justify: Literal["left", "right"] = "left" if heading in TEXT_COLUMNS else "right"
        table.add_column(heading, justify=justify, no_wrap=heading != "run", overflow="fold")
    for status in statuses:
        line, style = cells(status), STYLES.get(status.state, "")
        table.add_row(*(Text(line[name], style=style if name == "state" else "") for name in shown))
    return table


def remarks(statuses: Sequence[RunStatus]) -> list[str]:
    """What does not fit into a table: why a run is not running, how its last start ended, what is damaged."""
    lines = []
    for status in statuses:
        facts = [f"{status.state}: {status.why}"] if status.why and status.state != "completed" else []
        if status.ends and status.state in ("running", "starting", "restarting"):
            facts.append(f"the last start before this one: {status.ends[-1]}")
        facts += _trouble(status)
        lines += [f"{status.run}: {fact}" for fact in facts]
    return lines


def _trouble(status: RunStatus) -> list[str]:
    facts = [f"{name} is {why}" for name, why in status.damaged.items()]
    if status.checkpoint_problem is not None:
        facts.append(status.checkpoint_problem)
    if status.failed_saves:
        facts.append(f"{counted(status.failed_saves, 'checkpoint')} could not be written")
    return facts


def details(status: RunStatus) -> list[str]:
    """Everything about one run, a fact a line."""
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
