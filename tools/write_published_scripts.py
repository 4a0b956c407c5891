"""Write the layouts of slurm/published, as the planner recommends them: layouts.txt, and the table in each script.

It takes some minutes. See docs/planning.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ctxlm_ds.apps.plan.plan_run import text_table
from ctxlm_ds.console import run_command
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.hardware import GIB, GPUS, Cluster, Gpu
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig

if TYPE_CHECKING:
    from ctxlm_ds.apps.plan.plan import Plan, Planner

FOLDER = Path(__file__).resolve().parent.parent / "slurm" / "published"
LAYOUTS = FOLDER / "layouts.txt"
BEGIN = "# ---- layouts: tools/write_published_scripts.py writes this table ----"
END = "# ---- end of layouts ----"
INTRODUCTION = """\
# Layouts for tasks of one GPU, eight a node: recipe, GPU, nodes, --deepspeed_config, --set.
# Written by tools/write_published_scripts.py from what the planner recommends (docs/planning.md); read by common.sh.
"""
GPUS_PER_NODE = 8
NO_BF16 = ("training.precision=fp16",)
HEADER = ("GPU", "nodes", "dp", "tp", "pp", "zero", "micro", "recompute", "precision", "GiB/GPU", "s/step", "days")
MANY, FEW = (1, 4, 16, 64, 128), (1, 2, 4, 8)
SCRIPTS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "bert-base-lamb": (("bert-base-lamb-phase1", "bert-base-lamb-phase2"), MANY),
    "bert-large-lamb": (("bert-large-lamb-phase1", "bert-large-lamb-phase2"), MANY),
    "roberta-base": (("roberta-base",), MANY),
    "roberta-large": (("roberta-large",), MANY),
    "gpt1": (("gpt1",), FEW),
    "gpt2-small": (("gpt2-small",), MANY[:-1]),
    "gpt2-medium": (("gpt2-medium",), MANY[:-1]),
}
"""Recipes of each script, one per phase, and the numbers of nodes in its table."""


@dataclass(frozen=True)
class ReadyLayout:
    """A recipe on a cluster, and the plan for it."""

    recipe: str
    gpu: Gpu
    nodes: int
    plan: Plan

    @property
    def line(self) -> str:
        """A line of layouts.txt: recipe, GPU, nodes, DeepSpeed JSON, settings that differ from shipped recipes."""
        settings = self.plan.layout.settings(_config(self.recipe, self.gpu).parallel.pipeline_layers)
        changed = [
            setting for setting in settings
            if setting.startswith("training.micro_batch_size") or not setting.endswith(("=1", "=false"))
        ]  # fmt: skip
        precision = () if self.gpu.has_bf16 else NO_BF16
        zero = f"zero{self.plan.layout.zero_stage}"
        return " ".join([self.recipe, self.gpu.name, str(self.nodes), zero, *precision, *changed])

    @property
    def row(self) -> list[str]:
        """Cells of a table with HEADER."""
        plan, layout = self.plan, self.plan.layout
        numbers = (self.nodes, layout.data, layout.tensor, layout.pipeline, layout.zero_stage, layout.micro_batch_size)
        return [
            self.gpu.name, *map(str, numbers), "yes" if layout.recompute else "-",
            "bf16" if self.gpu.has_bf16 else "fp16", f"{plan.memory.total / GIB:.1f}",
            f"{plan.time.total:.3g}", f"{plan.days:.3g}",
        ]  # fmt: skip


@cache
def _config(recipe: str, gpu: Gpu) -> RunConfig:
    return load_config(recipe, () if gpu.has_bf16 else NO_BF16)


def planner_of(recipe: str, gpu: Gpu, nodes: int) -> Planner:
    """Return the planner of a published recipe on equal nodes of eight GPUs."""
    from ctxlm_ds.apps.plan.plan import Planner

    return Planner(_config(recipe, gpu), Cluster(gpu, nodes, GPUS_PER_NODE))


def recommended_layout(recipe: str, gpu: Gpu, nodes: int) -> ReadyLayout | None:
    """Return the layout that the planner recommends, or None if nothing fits."""
    from ctxlm_ds.apps.plan.search import search_layouts

    plan = search_layouts(planner_of(recipe, gpu, nodes)).recommended
    return None if plan is None else ReadyLayout(recipe, gpu, nodes, plan)


def table(layouts: Sequence[ReadyLayout]) -> str:
    """Return the table of one recipe as comments of a script."""
    lines = text_table(HEADER, [layout.row for layout in layouts])
    return "\n".join([f"# {layouts[0].recipe}", *(f"#   {line}" for line in lines)]) + "\n"


def with_tables(script: Path, tables: Sequence[str]) -> str:
    """Return a script's text with its tables, one per phase, between the two marks.

    Raises:
        ConfigError: a mark is missing.
    """
    before, begin, rest = script.read_text(encoding="utf-8").partition(BEGIN + "\n")
    _, end, after = rest.partition(END + "\n")
    if not begin or not end:
        raise ConfigError(f"{script} lacks the line {BEGIN!r} or {END!r}")
    return before + begin + "".join(tables) + end + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file would change")
    only_check = parser.parse_args().check
    lines: list[str] = []
    texts: dict[Path, str] = {}
    for name, (recipes, num_nodes) in SCRIPTS.items():
        tables = []
        for recipe in recipes:
            found = [recommended_layout(recipe, gpu, nodes) for gpu in GPUS for nodes in num_nodes]
            layouts = [layout for layout in found if layout is not None]
            lines += [layout.line for layout in layouts]
            tables.append(table(layouts))
        script = FOLDER / f"{name}.sbatch"
        texts[script] = with_tables(script, tables)
    texts[LAYOUTS] = INTRODUCTION + "\n".join(lines) + "\n"
    changed = [path for path, text in texts.items() if path.read_text(encoding="utf-8") != text]
    if only_check and changed:
        names = ", ".join(path.name for path in changed)
        raise ConfigError(f"{names}: not what the planner recommends now; run {Path(__file__).name}")
    for path in changed:
        path.write_text(texts[path], encoding="utf-8")
        print(path)


if __name__ == "__main__":
    run_command(main)
