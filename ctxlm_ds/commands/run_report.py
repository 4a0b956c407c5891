"""Show the curves of runs: the loss in the terminal, all curves, recipe, layout, starts and texts in a page."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN", help="run directory; several are overlaid")
    where = "RUN/report.html, or ./report.html for several"
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"page to write (default: {where})")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the curves as a PNG")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    from ctxlm_ds.installed import check_extra

    if args.png:
        check_extra("downstream", ["matplotlib"])
    from ctxlm_ds.atomic import write_text
    from ctxlm_ds.report import COLUMNS, terminal_picture, write_png
    from ctxlm_ds.training.run_page import PAGE_NAME, by_label, charts_of, read_run, run_page

    runs = by_label([read_run(run_dir) for run_dir in dict.fromkeys(args.run_dirs)])
    charts = charts_of(runs)
    for chart in charts[:1]:
        columns = max(COLUMNS, min(160, shutil.get_terminal_size().columns - 12))
        print("\n".join(terminal_picture(chart, columns)))
    output = args.output or (args.run_dirs[0] / PAGE_NAME if len(runs) == 1 else Path(PAGE_NAME))
    write_text(output, run_page(runs, charts))
    print(f"all curves: {output}")
    if args.png:
        write_png(charts, args.png)
        print(f"as a picture: {args.png}")
