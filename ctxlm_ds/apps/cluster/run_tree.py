"""The tree of runs: a branch (`ctxlm fork`) or a run with `initialize_from` is below the run that it began with."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ctxlm_ds.atomic import read_object
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, list_checkpoints
from ctxlm_ds.console import aligned
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.process.run_files import FORK_RECORD, METRICS_NAME, read_lines, read_value
from ctxlm_ds.recipe.yaml_source import read_yaml
from ctxlm_ds.untrusted_json import read_text

if TYPE_CHECKING:
    from ctxlm_ds.apps.cluster.run_status import RunStatus


class Begin(NamedTuple):
    """What a run began with."""

    run: Path
    step: int
    """Of the checkpoint; 0 if only its run is named."""
    what: str


def begin_of(run_dir: Path) -> Begin | None:
    """Return what a run began with, by its forked_from.json or config.yaml; None for fresh weights."""
    what, named = "branch", (read_object(run_dir / FORK_RECORD) or {}).get("checkpoint")
    if named is None:
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
        yield indent + mark + runs[path].run, *_cells(path, runs[path], begins.get(path))
        inner = indent + {"": "", "├─ ": "│  ", "└─ ": "   "}[mark]
        children = sorted((run for run in below[path] if run not in drawn), key=lambda run: (begins[run].step, run))
        for child in children:
            yield from draw(child, inner, "└─ " if child == children[-1] else "├─ ")

    rows: list[tuple[str, ...]] = [("run", "began with", "step", "tokens", "loss", "state")]
    roots = [path for path in runs if path not in begins or begins[path].run not in runs]
    for path in (*roots, *runs):
        rows += [] if path in drawn else list(draw(path, "", ""))
    return aligned(rows, left=(0, 1, 5), indent="")


def _cells(path: Path, status: RunStatus, begin: Begin | None) -> tuple[str, ...]:
    """Return what a run began with, its step, tokens, last loss and state; those of its checkpoint before it starts."""
    records = deque(read_lines(path / METRICS_NAME), maxlen=1)
    step, folder = max(list_checkpoints(path / CHECKPOINTS_DIR).items(), default=(0, path))
    state = (read_object(folder / "state.json") or {}).get("train_state")
    counts = records[0] if records else state if isinstance(state, dict) else {}
    tokens, now = read_value(counts, "tokens", int), status.step or read_value(counts, "step", int) or step
    origin = "" if begin is None else f"{begin.what} of step {begin.step:,}" if begin.step else begin.what
    loss = "-" if status.loss is None else f"{status.loss:.4f}"
    why = f": {status.why}" if status.state == "not started" else ""
    return origin, f"{now:,}", "-" if tokens is None else f"{tokens:,}", loss, status.state + why
