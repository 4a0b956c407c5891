"""Compare choices of layers on a task of words (BERT, Devlin 2019, table 7): a small model over frozen vectors each."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxlm_ds import finetune
from ctxlm_ds.atomic import write_text
from ctxlm_ds.console import setup_logging
from ctxlm_ds.errors import ConfigError

logger = logging.getLogger("ctxlm_ds")
ROWS = {
    "Embeddings": "0",
    "Second-to-last hidden": "-2",
    "Last hidden": "-1",
    "Weighted sum last four hidden": "mix:4",
    "Concat last four hidden": "concat:4",
    "Weighted sum all layers": "mix:all",
}
"""The published rows; the last one has the embeddings, too."""
Row = tuple[str, Path, str, list[str]]
"""Name, source, layers, further options."""
OWN = ("--layers", "--features", "--output", "--model", "--point")


def main(argv: Sequence[str] | None = None) -> None:
    """Run each row, and write table.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="Further options are those of ctxlm_ds.finetune: --task, --data, --seeds, …",
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--features", required=True, type=Path, metavar="DIR", help="model folder")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder of the results")
    parser.add_argument(
        "--compare", type=Path, nargs="*", default=[], metavar="FILE", help="static vectors, one row per file"
    )
    parser.add_argument("--pooling", choices=["first", "mean", "last"], help="of the model's words (default: first)")
    arguments, further = parser.parse_known_args(argv)
    taken = next((word for word in further if word.split("=")[0] in OWN), None)
    if taken is not None:
        raise ConfigError(f"{taken}: the table chooses it itself")
    setup_logging()
    rows: list[Row] = [(f"Static: {path.stem}", path, "0", []) for path in arguments.compare]
    pooling = [] if arguments.pooling is None else ["--pooling", arguments.pooling]
    rows += [(name, arguments.features, layers, pooling) for name, layers in _rows_of(arguments.features)]
    lines = []
    for name, features, layers, options in rows:
        folder = arguments.output / f"{features.stem}-{layers.replace(':', '')}"
        finetune.main(["--features", str(features), "--layers", layers, "--output", str(folder), *options, *further])
        lines.append(_line(name, json.loads((folder / "metrics.json").read_text(encoding="utf-8"))))
    text = "\n".join([*_head(lines), *(line for line, _ in lines)]) + "\n"
    write_text(arguments.output / "table.md", text)
    print(text, end="")


def _rows_of(features: Path) -> list[tuple[str, str]]:
    """Return the rows that a model has layers for; a line of the log names each of the others."""
    from ctxlm_ds.apps.downstream.features.choice import LayerChoice
    from ctxlm_ds.apps.downstream.features.sources import open_source

    source = open_source(features)
    found = []
    for name, layers in ROWS.items():
        try:
            LayerChoice.parse(layers).check(source.num_layers, source)
        except ConfigError as error:
            logger.warning("the table has no row %r: %s", name, error)
        else:
            found.append((name, layers))
    return found


def _line(name: str, summary: dict[str, Any]) -> tuple[str, str]:
    metric = summary["metric"]
    figures = summary["chosen"]["dev"][metric]
    spread = f"{figures['median']:.3f} ({figures['lowest']:.3f} to {figures['highest']:.3f})"
    return f"| {name} | {spread} |", metric


def _head(lines: Sequence[tuple[str, str]]) -> list[str]:
    return [f"| Vectors | dev {lines[0][1]}, median (lowest to highest) |", "|---|---|"]
