"""Show the curves of a run: a picture in the terminal, all of them and the recipe in RUN/report.html."""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path
from typing import Any

PAGE_NAME = "report.html"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"page to write (default: RUN/{PAGE_NAME})")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    from ctxlm_ds.atomic import write_text
    from ctxlm_ds.cluster.run_files import CONFIG_NAME
    from ctxlm_ds.recipe.load import dump_config, load_saved_config
    from ctxlm_ds.registry import OBJECTIVES
    from ctxlm_ds.report import page, run_charts, svg, terminal_picture

    records = read_records(args.run_dir)
    config = load_saved_config(args.run_dir / CONFIG_NAME)
    term = OBJECTIVES.get(config.objective.name).terms[0].name
    charts = [chart for chart in run_charts(records, term, {}) if any(chart.curves.values())]
    for chart in charts[:1]:
        print("\n".join(terminal_picture(chart)))
    sections = {
        "Curves": [f"<h3>{escape(chart.title)}</h3>\n{svg(chart)}" for chart in charts],
        "Recipe": [f"<pre>{escape(dump_config(config))}</pre>"],
    }
    output = args.output or args.run_dir / PAGE_NAME
    write_text(output, page(config.name, sections))
    print(f"all curves: {output}")


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl.

    Raises:
        DataError: the folder is no run, or the file is empty or damaged.
    """
    from ctxlm_ds.cluster.run_files import METRICS_NAME
    from ctxlm_ds.errors import DataError
    from ctxlm_ds.report import read_metrics

    path = run_dir / METRICS_NAME
    if not path.is_file():
        raise DataError(f"{path}: no such file; give the directory of a run that has trained, such as runs/NAME")
    try:
        records = read_metrics(path)
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}; resume the run, which repairs its end") from error
    if not all(isinstance(record, dict) and "step" in record for record in records):
        raise DataError(f"{path} is damaged: a line is no object with a step")
    if not records:
        raise DataError(f"{path} is empty: no step of the run is finished yet")
    return records
