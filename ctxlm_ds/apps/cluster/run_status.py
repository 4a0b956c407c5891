"""Show the state of runs: step, loss, speed, time left, last checkpoint, restarts and their reasons.

Reads the run directories only (and squeue, if there is one), so it runs on a login node without torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from ctxlm_ds.apps.cluster.run_files import find_runs
from ctxlm_ds.apps.cluster.status import RunStatus, read_statuses
from ctxlm_ds.console import aligned, counted, format_duration
from ctxlm_ds.process.run_history import shortened

DEFAULT_RUNS = "runs/*"
HEADINGS = ("run", "state", "step", "loss", "tokens/s", "left", "checkpoint", "restarts", "skipped", "job")
UNKNOWN = "-"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "run_dirs", nargs="*", default=[DEFAULT_RUNS], metavar="RUN_DIR",
        help=f"run directories, globs, or folders of runs (default: {DEFAULT_RUNS})",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a JSON list with everything that is known")
    parser.add_argument("--watch", type=float, metavar="N", help="show it every N seconds, until Ctrl-C")
    return parser.parse_args()


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
        "job": status.array_task or status.job_id or UNKNOWN,
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
        facts = [f"{status.state}: {shortened(status.why)}"] if status.why and status.state != "completed" else []
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
    below = "\n" + " " * (width + 4)
    lines = [status.run, *(f"  {name.ljust(width)}  {below.join(text.splitlines())}" for name, text in pairs)]
    lines += [f"  {fact}" for fact in _trouble(status)]
    if status.ends:
        lines.append("  how its starts ended:")
        lines += [f"    {number}. {end}" for number, end in enumerate(status.ends, 1)]
    return lines


def show(statuses: Sequence[RunStatus], as_json: bool) -> None:
    """Print the statuses once."""
    if as_json:
        print(json.dumps([asdict(status) for status in statuses], indent=1))
        return
    if len(statuses) == 1:
        print("\n".join(details(statuses[0])))
        return
    print("\n".join([*table(statuses), *remarks(statuses)]))


def main() -> None:
    args = parse_arguments()
    while True:
        statuses = read_statuses(find_runs(args.run_dirs))
        if args.watch and sys.stdout.isatty():
            print("\033[2J\033[H", end="")
        show(statuses, args.json)
        if not args.watch:
            break
        sys.stdout.flush()
        try:
            time.sleep(args.watch)
        except KeyboardInterrupt:
            break
    if all(status.state == "no such folder" for status in statuses):
        sys.exit(2)
