"""Write docs/config.md from the schema's docstrings; `--check` only compares."""

from __future__ import annotations

import argparse
from pathlib import Path

from ctxlm_ds.atomic import write_text
from ctxlm_ds.console import run_command
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.describe import render_reference

DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "config.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="file to write (default: docs/config.md)")
    parser.add_argument("--check", action="store_true", help="exit with an error where the file is not up to date")
    arguments = parser.parse_args()
    page = render_reference()
    if not arguments.check:
        write_text(arguments.output, page)
        print(f"wrote {arguments.output}")
        return
    written = arguments.output.read_text(encoding="utf-8") if arguments.output.exists() else ""
    if written != page:
        raise ConfigError(f"{arguments.output} is not what the schema says; run: python tools/write_config_docs.py")
    print(f"{arguments.output} is up to date")


if __name__ == "__main__":
    run_command(main)
