"""Show the state of runs: step, loss, speed, time left, last checkpoint, restarts and their reasons.

Reads the run directories only (and squeue, if there is one), so it runs on a login node without torch.
"""

from __future__ import annotations

import argparse
import glob
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

# A login node has the checkout and a Python; the package need not be installed there.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ctxlm_ds.console import run_command

if TYPE_CHECKING:
    from ctxlm_ds.cluster.status import RunStatus

DEFAULT_RUNS = "runs/*"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "run_dirs", nargs="*", default=[DEFAULT_RUNS], metavar="RUN_DIR",
        help=f"run directories, globs, or folders of runs (default: {DEFAULT_RUNS})",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a JSON list with everything that is known")
    parser.add_argument("--watch", type=float, metavar="N", help="show it every N seconds, until Ctrl-C")
    return parser


def find_runs(patterns: list[str]) -> list[Path]:
    """Return run directories, each once: a pattern's matches, and the runs in a folder that is not a run."""
    from ctxlm_ds.cluster.run_files import is_run

    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = [Path(path) for path in sorted(glob.glob(pattern))] or [Path(pattern)]
        # A pattern may match other files; a named path is always shown.
        for path in [path for path in matches if path.is_dir()] if len(matches) > 1 else matches:
            below = [] if is_run(path) else [child for child in sorted(path.glob("*")) if is_run(child)]
            found.update(dict.fromkeys(below or [path]))
    return list(found)


def show(statuses: list[RunStatus], as_json: bool) -> None:
    """Print the statuses once."""
    from ctxlm_ds.cluster.status_view import details, remarks, table

    if as_json:
        print(json.dumps([asdict(status) for status in statuses], indent=1))
        return
    if len(statuses) == 1:
        print("\n".join(details(statuses[0])))
        return
    print("\n".join([*table(statuses), *remarks(statuses)]))


def main() -> None:
    args = build_parser().parse_args()
    from ctxlm_ds.cluster.status import read_statuses

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


if __name__ == "__main__":
    run_command(main)
