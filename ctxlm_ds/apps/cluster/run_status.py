"""Show the state of runs: step, loss, speed, time left, newest checkpoint, restarts, and the last failure.

Reads RUN/status.json, which rank 0 and its job write, the run's lock, and Slurm's queue if there is one. It needs
neither torch nor numpy (a login node), and never fails for a damaged run. In a tree a branch (`ctxlm fork`) or a
run with `initialize_from` is below the run that it began with.
"""

from __future__ import annotations

import argparse
import glob
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ctxlm_ds.apps.cluster.job_context import SWEEP_NAME
from ctxlm_ds.apps.cluster.slurm_commands import NEXT_TASK, call
from ctxlm_ds.atomic import read_object
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, list_checkpoints
from ctxlm_ds.checkpoint.manifest import MANIFEST_NAME, verify
from ctxlm_ds.console import aligned, format_duration
from ctxlm_ds.errors import CheckpointError, ClusterError, ConfigError
from ctxlm_ds.process import run_files
from ctxlm_ds.process.failure import shortened
from ctxlm_ds.process.run_files import read_value
from ctxlm_ds.process.run_history import ATTEMPTS_DIR, HISTORY_NAME
from ctxlm_ds.process.run_lock import LOCK_NAME, STALE_AFTER_S, look_at_lock, this_process
from ctxlm_ds.untrusted_json import read_text

RUN_FILES = (run_files.STATUS_NAME, HISTORY_NAME, LOCK_NAME, ATTEMPTS_DIR, CHECKPOINTS_DIR)
SQUEUE_TIMEOUT_S = 5.0
STALE_S = 2 * STALE_AFTER_S  # age at which a heartbeat is stale; clocks of nodes may differ a little
KINDS: dict[str, type] = {
    **dict.fromkeys(("step", "of", "skipped", "rollbacks"), int),
    **dict.fromkeys(("loss", "tokens_per_second", "left_s"), float),
    **dict.fromkeys(("last_failure", "job_id", "log"), str),
}
"""Values of status.json that are shown as they are."""
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SUSPENDED", "STOPPED")
ACTIVE = ("RUNNING", "CONFIGURING", "COMPLETING", "SIGNALING", "STAGE_OUT")  # Slurm's states
DEFAULT_RUNS = "runs/*"
UNKNOWN = "-"


@dataclass
class RunStatus:
    """Everything known about one run; None if a thing is unknown or does not apply."""

    run: str
    state: str = "never started"
    """running, starting, restarting, queued, stopped, completed, failed, stale, never started, not started (a branch),
    no status.json, no such folder."""
    why: str | None = None  # reason for that state, if there is one
    step: int | None = None
    of: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    left_s: float | None = None
    checkpoint: str | None = None
    checkpoint_age_s: float | None = None
    checkpoint_problem: str | None = None
    restarts: int = 0
    skipped: int = 0
    rollbacks: int = 0
    last_failure: str | None = None
    job_id: str | None = None
    log: str | None = None
    verdict: Sequence[str] = ()


def is_run(folder: Path) -> bool:
    """Return whether a folder holds anything of a run."""
    return any((folder / name).exists() for name in RUN_FILES)


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """Return run directories, each once: a pattern's matches, and the runs in a folder that is not a run.

    Runs of a sweep count before they have begun, too. The shell expands a pattern, too: of several paths those that are
    no folders are left out, but not those that are missing.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        for path in [Path(match) for match in sorted(glob.glob(pattern))] or [Path(pattern)]:
            sweep = (path / SWEEP_NAME).is_file()
            inside = () if is_run(path) else sorted(path.glob("*"))
            runs = [child for child in inside if is_run(child) or (sweep and child.name.isdigit())]
            found.update(dict.fromkeys(runs or [path]))
    return [path for path in found if path.is_dir() or not path.exists()] or list(found)


def read_statuses(run_dirs: Sequence[Path], queue: Mapping[str, str] | None = None) -> list[RunStatus]:
    """Return the status of each run directory; `queue` has states by job id, None asks squeue if there is one."""
    found = [(run_dir, run_files.read_status(run_dir)) for run_dir in run_dirs]
    if queue is None:
        queue = ask_queue(job_id for _, values in found for job_id in _jobs(values))
    return [_status(run_dir, values, queue) for run_dir, values in found]


def ask_queue(job_ids: Iterable[str]) -> dict[str, str]:
    """Return the states of the jobs that squeue knows, by id; empty if there is no Slurm or it does not answer."""
    wanted = sorted(set(job_ids))
    # %i of a task of an array is its name, 15_0.
    words = ["squeue", "--noheader", "--states=all", "--array", "--format=%A %T %i", "--jobs=" + ",".join(wanted)]
    try:
        rows = [line.split() for line in call(words, SQUEUE_TIMEOUT_S).splitlines()] if wanted else []
    except ClusterError as error:  # which forgets a job that ended
        return dict.fromkeys(wanted, "") if "Invalid job id" in str(error) else {}
    return {name: row[1] for row in rows if len(row) == 3 for name in (row[0], row[2])}


def _jobs(values: Mapping[str, Any]) -> list[str]:
    """Return the job that has the run, and the one that was submitted last."""
    return [job for name in ("job_id", "submitted") if (job := read_value(values, name, str)) is not None]


def _status(run_dir: Path, values: Mapping[str, Any], queue: Mapping[str, str]) -> RunStatus:
    if not run_dir.is_dir():
        return RunStatus(str(run_dir), "no such folder")
    if not values and (run_dir / run_files.FORK_RECORD).is_file():
        why = f"`ctxlm pretrain --config {run_dir / 'config.yaml'}` starts it"
        return RunStatus(str(run_dir), "not started", why)
    if not values and is_run(run_dir):
        return RunStatus(str(run_dir), "no status.json")
    found = ((name, read_value(values, name, kind)) for name, kind in KINDS.items())
    known: dict[str, Any] = {name: value for name, value in found if value is not None}
    status = RunStatus(str(run_dir), *_judge(run_dir, values, queue), **known)
    status.restarts = max(0, (read_value(values, "starts", int) or 1) - 1)
    status.verdict = run_files.read_verdict(values)
    if (checkpoint := read_value(values, "checkpoint", str)) is not None:
        folder = run_dir / CHECKPOINTS_DIR / Path(checkpoint).name
        status.checkpoint = folder.name
        try:
            status.checkpoint_age_s = max(0.0, time.time() - (folder / MANIFEST_NAME).stat().st_mtime)
            verify(folder, quick=True)  # the sizes of its files, which is fast
        except (CheckpointError, OSError) as error:
            status.checkpoint_problem = str(error)
    return status


def _judge(run_dir: Path, values: Mapping[str, Any], queue: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the state and the reason: by the live holder of the lock, by Slurm's queue, then by the file."""
    state, why = read_value(values, "state", str) or "never started", read_value(values, "why", str)
    holder, silence = _look_at_holder(run_dir)
    if holder and not silence:
        return ("running" if state == "running" else "starting"), None
    jobs = {job: queue.get(job, "") for job in _jobs(values)}
    for job, in_queue in jobs.items():
        if in_queue in WAITING:
            return "queued", f"job {job} is {in_queue.lower()}"
    for job, in_queue in jobs.items():
        if in_queue in ACTIVE and state in ("starting", "running", "failed", "queued", "never started"):
            return ("restarting" if values.get("starts") else "starting"), f"job {job} is {in_queue.lower()}"
    if state in ("running", "starting"):
        return "stale", silence or "no process has the run"
    if state == "queued" and queue and not str(why).startswith(NEXT_TASK):
        return "stopped", f"{why}, and no job is in the queue since"
    return state, why


def _look_at_holder(run_dir: Path) -> tuple[str, str]:
    """Return the holder of the run's lock, and why it does not count as alive; empty without one."""
    try:
        lock = look_at_lock(run_dir / LOCK_NAME)
    except OSError:
        return "", ""
    if lock is None or not lock.token:
        return "", ""
    holder = lock.describe()
    if lock.same_machine(this_process()) and lock.has_ended():
        return holder, f"{holder} has ended and recorded no reason"
    return holder, "" if lock.age_s < STALE_S else f"no heartbeat of {holder} for {lock.age_s / 60:.0f} minutes"


def cells(status: RunStatus) -> dict[str, str]:
    """Return a run's row of the table by heading."""
    checkpoint = UNKNOWN
    if status.checkpoint is not None:
        age = "damaged" if status.checkpoint_problem else f"{format_duration(status.checkpoint_age_s or 0)} ago"
        checkpoint = f"{status.checkpoint.rpartition('-')[2].lstrip('0') or '0'}, {age}"
    last = "" if status.of is None else f"/{status.of}"
    return {
        "run": status.run,
        "state": status.state,
        "step": UNKNOWN if status.step is None else f"{status.step}{last}",
        "loss": UNKNOWN if status.loss is None else f"{status.loss:.4f}",
        "tokens/s": UNKNOWN if status.tokens_per_second is None else f"{status.tokens_per_second:,.0f}",
        "left": format_duration(status.left_s) if status.left_s and status.state == "running" else UNKNOWN,
        "checkpoint": checkpoint,
        "restarts": str(status.restarts),
        "skipped": f"{status.skipped}, {status.rollbacks} back" if status.rollbacks else str(status.skipped),
        "job": status.job_id or UNKNOWN,
    }


def remarks(status: RunStatus, form: Callable[[str], str] = shortened) -> list[str]:
    """Return what does not fit into a table: why a run is not running, how it failed last, what is damaged."""
    facts = [f"{status.state}: {form(status.why)}"] if status.why and status.state != "completed" else []
    if status.last_failure and status.state in ("running", "starting", "restarting", "queued"):
        facts.append(f"the last failure: {form(status.last_failure)}")
    return facts + ([status.checkpoint_problem] if status.checkpoint_problem else [])


def details(status: RunStatus) -> list[str]:
    """Return everything about one run, a fact per line."""
    if status.state == "no such folder":
        return [f"{status.run}: no such folder; give a run directory such as runs/NAME, or a folder of runs"]
    (_, run), *facts = cells(status).items()
    log = [] if status.log is None else [("log", status.log)]
    lines = "\n".join(remarks(status, str.strip)).splitlines()
    lines += [f"verdict: {line}" for line in status.verdict]
    return [run, *aligned([*facts, *log], left=(0, 1)), *(f"  {line}" for line in lines)]


def show(statuses: Sequence[RunStatus], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(status) for status in statuses], indent=1))
    elif len(statuses) == 1:
        print("\n".join(details(statuses[0])))
    else:
        rows = [cells(status) for status in statuses]
        table = [list(rows[0]), *(list(row.values()) for row in rows)]
        facts = [f"{status.run}: {remark}" for status in statuses for remark in remarks(status)]
        print("\n".join([*aligned(table, left=(0, 1), indent=""), *facts]))


class Begin(NamedTuple):
    run: Path
    step: int
    """Of the checkpoint; 0 if only its run is named."""
    what: str


def begin_of(run_dir: Path) -> Begin | None:
    """Return what a run began with, by its forked_from.json or config.yaml; None for fresh weights."""
    what, named = "branch", (read_object(run_dir / run_files.FORK_RECORD) or {}).get("checkpoint")
    if named is None:
        from ctxlm_ds.recipe.yaml_source import read_yaml  # a login node may lack PyYAML

        try:
            recipe = read_yaml(read_text(run_dir / "config.yaml"), "config.yaml").data
        except (ConfigError, ValueError):
            return None
        what, named = "weights", recipe.get("initialize_from") if isinstance(recipe, dict) else None
    if not isinstance(named, str):
        return None
    path, number = Path(named).resolve(), named.rpartition("-")[2]
    is_step = path.parent.name == CHECKPOINTS_DIR and number.isdecimal()
    return Begin(path.parents[1], int(number), what) if is_step else Begin(path, 0, what)


def tree_lines(statuses: Sequence[RunStatus]) -> list[str]:
    """Return a line for each run, below the run that it began with, in the order of the steps at which they did."""
    runs = {Path(status.run).resolve(): status for status in statuses}
    begins = {path: begin for path in runs if (begin := begin_of(path)) is not None}
    below = {path: [run for run, begin in begins.items() if begin.run == path != run] for path in runs}
    drawn: set[Path] = set()

    def draw(path: Path, indent: str, mark: str) -> Iterator[tuple[str, ...]]:
        drawn.add(path)
        yield indent + mark + runs[path].run, *_tree_cells(path, runs[path], begins.get(path))
        inner = indent + {"": "", "├─ ": "│  ", "└─ ": "   "}[mark]
        children = sorted((run for run in below[path] if run not in drawn), key=lambda run: (begins[run].step, run))
        for child in children:
            yield from draw(child, inner, "└─ " if child == children[-1] else "├─ ")

    rows: list[tuple[str, ...]] = [("run", "began with", "step", "tokens", "loss", "state")]
    roots = [path for path in runs if path not in begins or begins[path].run not in runs]
    for path in (*roots, *runs):
        rows += [] if path in drawn else list(draw(path, "", ""))
    return aligned(rows, left=(0, 1, 5), indent="")


def _tree_cells(path: Path, status: RunStatus, begin: Begin | None) -> tuple[str, ...]:
    """Return what a run began with, its step, tokens, last loss and state; those of its checkpoint before it starts."""
    lines = run_files.read_lines(path / run_files.METRICS_NAME)
    records = deque((line for line in lines if "tokens" in line), maxlen=1)
    step, folder = max(list_checkpoints(path / CHECKPOINTS_DIR).items(), default=(0, path))
    state = (read_object(folder / "state.json") or {}).get("train_state")
    counts = records[0] if records else state if isinstance(state, dict) else {}
    tokens, now = read_value(counts, "tokens", int), status.step or read_value(counts, "step", int) or step
    origin = "" if begin is None else f"{begin.what} of step {begin.step:,}" if begin.step else begin.what
    loss = "-" if status.loss is None else f"{status.loss:.4f}"
    why = f": {status.why}" if status.state == "not started" else ""
    return origin, f"{now:,}", "-" if tokens is None else f"{tokens:,}", loss, status.state + why


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "run_dirs", nargs="*", default=[DEFAULT_RUNS], metavar="RUN_DIR",
        help=f"run directories, globs, or folders of runs (default: {DEFAULT_RUNS})",
    )  # fmt: skip
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON list with everything that is known")
    form.add_argument("--tree", action="store_true", help="draw branches below the runs that they began with")
    args = parser.parse_args()
    statuses = read_statuses(find_runs(args.run_dirs))
    if args.tree:
        print("\n".join(tree_lines(statuses)))
    else:
        show(statuses, args.json)
    if all(status.state == "no such folder" for status in statuses):
        sys.exit(2)
