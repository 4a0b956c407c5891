"""Write the layouts of slurm/published, as the planner recommends them: layouts.txt, and the table in each script.

It takes some minutes. See docs/planning.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ctxlm_ds.console import run_command

if TYPE_CHECKING:
    from ctxlm_ds.planning.ready_runs import ReadyLayout

FOLDER = Path(__file__).resolve().parent.parent / "slurm" / "published"
LAYOUTS = FOLDER / "layouts.txt"
BEGIN = "# ---- layouts: tools/write_published_scripts.py writes this table ----"
END = "# ---- end of layouts ----"
INTRODUCTION = """\
# Layouts for tasks of one GPU, eight a node: recipe, GPU, nodes, --deepspeed_config, --set.
# Written by tools/write_published_scripts.py from what the planner recommends (docs/planning.md); read by common.sh.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file would change")
    arguments = parser.parse_args()
    from ctxlm_ds.errors import ConfigError
    from ctxlm_ds.planning.ready_runs import READY_RUNS, ready_layouts

    lines: list[str] = []
    changed = []
    for run in READY_RUNS:
        layouts = list(ready_layouts(run))
        lines += [layout.words for layout in layouts]
        tables = [[layout for layout in layouts if layout.recipe == recipe] for recipe in run.recipes]
        script = FOLDER / f"{run.script}.sbatch"
        changed += write(script, with_tables(script.read_text(encoding="utf-8"), tables), arguments.check)
    changed += write(LAYOUTS, INTRODUCTION + "\n".join(lines) + "\n", arguments.check)
    if arguments.check and changed:
        raise ConfigError(f"{', '.join(changed)}: not what the planner recommends now; run {Path(__file__).name}")


def with_tables(text: str, tables: Sequence[Sequence[ReadyLayout]]) -> str:
    """Return a script with its tables, one per phase, between the two marks.

    Raises:
        ConfigError: a mark is missing.
    """
    from ctxlm_ds.errors import ConfigError
    from ctxlm_ds.planning.ready_runs import table

    before, begin, rest = text.partition(BEGIN + "\n")
    _, end, after = rest.partition(END + "\n")
    if not begin or not end:
        raise ConfigError(f"a script in {FOLDER} lacks the line {BEGIN!r} or {END!r}")
    shown = []
    for layouts in tables:
        shown += [f"# {layouts[0].recipe}", *(f"#   {line}" for line in table(layouts))]
    return before + begin + "\n".join(shown) + "\n" + end + after


def write(path: Path, text: str, only_check: bool) -> list[str]:
    """Write a file; return its name in a list if it changes."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return []
    if not only_check:
        path.write_text(text, encoding="utf-8")
        print(path)
    return [path.name]


if __name__ == "__main__":
    run_command(main)
