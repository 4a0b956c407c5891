"""Show the curves of runs: the loss in the terminal, all curves, recipe, layout, starts and texts in a page."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from ctxlm_ds.apps.cluster.run_files import METRICS_NAME, find_runs


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    runs_help = "run directory, or a folder of runs; several runs are overlaid"
    parser.add_argument("run_dirs", nargs="+", metavar="RUN", help=runs_help)
    where = "RUN/report.html, or ./report.html for several"
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"page to write (default: {where})")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the curves as a PNG")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    from ctxlm_ds.installed import check_extra

    if args.png:
        check_extra("downstream", ["matplotlib"])
    from ctxlm_ds.apps.report.charts import COLUMNS, terminal_picture, write_png
    from ctxlm_ds.atomic import write_text
    from ctxlm_ds.training.hooks.run_page import PAGE_NAME, by_label, charts_of, comparison, read_run, run_page

    runs = by_label([read_run(run_dir) for run_dir in begun_runs(find_runs(args.run_dirs))])
    charts = charts_of(runs)
    for chart in charts[:1]:
        columns = max(COLUMNS, min(160, shutil.get_terminal_size().columns - 12))
        print("\n".join(terminal_picture(chart, columns)))
    if len(runs) > 1:
        print("\n".join(comparison(runs)))
    folder = next(iter(runs.values())).run_dir if len(runs) == 1 else Path()
    output = args.output or folder / PAGE_NAME
    write_text(output, run_page(runs, charts))
    print(f"all curves: {output}")
    if args.png:
        write_png(charts, args.png)
        print(f"as a picture: {args.png}")


def begun_runs(run_dirs: Sequence[Path]) -> list[Path]:
    """Leave out, and name, folders in which no step is finished, unless all are such."""
    waiting = [folder for folder in run_dirs if folder.is_dir() and not _has_lines(folder / METRICS_NAME)]
    if len(waiting) == len(run_dirs):
        return list(run_dirs)
    for folder in waiting:
        print(f"{folder}: no step is finished yet; left out")
    return [folder for folder in run_dirs if folder not in waiting]


def _has_lines(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0
