"""Write the layouts of slurm/published, as the planner recommends them: layouts.txt, and the tables in each script.

It takes some minutes. See docs/planning.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ctxlm_ds.apps.plan.layouts import Layout
from ctxlm_ds.apps.plan.plan_run import text_table
from ctxlm_ds.console import run_command
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.hardware import GIB, GPUS, Cluster, Gpu
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.phases import run_phases
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
SCRIPTS: dict[str, tuple[int, ...]] = {
    "bert-base-lamb": MANY,
    "bert-large-lamb": MANY,
    "roberta-base": MANY,
    "roberta-large": MANY,
    "gpt1": FEW,
    "gpt2-small": MANY[:-1],
    "gpt2-medium": MANY[:-1],
}
"""Recipe of each script, and the numbers of nodes in its tables."""


@dataclass(frozen=True)
class ReadyLayout:
    """A recipe on a cluster, and the plan of each phase; the phases share a DeepSpeed JSON."""

    recipe: str
    gpu: Gpu
    nodes: int
    plans: tuple[Plan, ...]

    @property
    def line(self) -> str:
        """A line of layouts.txt: recipe, GPU, nodes, DeepSpeed JSON, settings that differ from shipped recipes."""
        words = [self.recipe, self.gpu.name, str(self.nodes), f"zero{self.plans[0].layout.zero_stage}"]
        words += () if self.gpu.has_bf16 else NO_BF16
        before = Layout(1).settings(None)
        for number, plan in enumerate(self.plans):
            settings = plan.layout.settings(None)
            changed = [one for one in settings if one.startswith("training.micro_batch_size") or one not in before]
            words += [f"phases.{number}.set.{one}" if number else one for one in changed]
            before = settings
        return " ".join(words)

    def row(self, phase: int) -> list[str]:
        """Return the cells of a phase in a table with HEADER."""
        plan, layout = self.plans[phase], self.plans[phase].layout
        numbers = (self.nodes, layout.data, layout.tensor, layout.pipeline, layout.zero_stage, layout.micro_batch_size)
        return [
            self.gpu.name, *map(str, numbers), "yes" if layout.recompute else "-",
            "bf16" if self.gpu.has_bf16 else "fp16", f"{plan.memory.total / GIB:.1f}",
            f"{plan.time.total:.3g}", f"{plan.days:.3g}",
        ]  # fmt: skip


@cache
def _phases(recipe: str, gpu: Gpu) -> list[RunConfig]:
    return [phase.config for phase in run_phases(load_config(recipe, () if gpu.has_bf16 else NO_BF16))]


def planners_of(recipe: str, gpu: Gpu, nodes: int) -> list[Planner]:
    """Return the planner of each phase of a published recipe on equal nodes of eight GPUs."""
    from ctxlm_ds.apps.plan.plan import Planner

    return [Planner(phase, Cluster(gpu, nodes, GPUS_PER_NODE)) for phase in _phases(recipe, gpu)]


def recommended_layout(recipe: str, gpu: Gpu, nodes: int) -> ReadyLayout | None:
    """Return the layouts that the planner recommends, or None if nothing fits.

    All phases get the highest ZeRO stage among them. Raises ConfigError if their plans cannot be one run.
    """
    from ctxlm_ds.apps.plan.search import search_layouts

    planners = planners_of(recipe, gpu, nodes)
    best = [plan.layout for planner in planners if (plan := search_layouts(planner).recommended) is not None]
    if len(best) < len(planners):
        return None
    stage = max(layout.zero_stage for layout in best)
    plans = [planner.weigh(replace(one, zero_stage=stage)) for planner, one in zip(planners, best, strict=True)]
    shapes = {(one.tensor, one.pipeline, one.sequence_parallel) for one in best}
    if len(shapes) > 1 or any(plan.memory.total > planners[0].cluster.usable_bytes for plan in plans):
        layouts = "; ".join(str(plan.layout) for plan in plans)
        raise ConfigError(f"{recipe}, {nodes} nodes of {gpu.name}: one run cannot have the layouts {layouts}")
    return ReadyLayout(recipe, gpu, nodes, tuple(plans))


def tables(layouts: Sequence[ReadyLayout]) -> str:
    """Return the tables of a recipe, one per phase, as comments of a script."""
    first = layouts[0]
    count, lines = len(first.plans), []
    for number in range(count):
        lines.append(first.recipe if count == 1 else f"{first.recipe}, phase {number + 1} of {count}")
        rows = text_table(HEADER, [layout.row(number) for layout in layouts])
        lines += [f"  {row}" for row in rows]
    return "".join(f"# {line}\n" for line in lines)


def with_tables(script: Path, text: str) -> str:
    """Return a script's text with the tables `text` between the two marks.

    Raises:
        ConfigError: a mark is missing.
    """
    before, begin, rest = script.read_text(encoding="utf-8").partition(BEGIN + "\n")
    _, end, after = rest.partition(END + "\n")
    if not begin or not end:
        raise ConfigError(f"{script} lacks the line {BEGIN!r} or {END!r}")
    return before + begin + text + end + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file would change")
    only_check = parser.parse_args().check
    lines: list[str] = []
    texts: dict[Path, str] = {}
    for recipe, num_nodes in SCRIPTS.items():
        found = [recommended_layout(recipe, gpu, nodes) for gpu in GPUS for nodes in num_nodes]
        layouts = [layout for layout in found if layout is not None]
        lines += [layout.line for layout in layouts]
        script = FOLDER / f"{recipe}.sbatch"
        texts[script] = with_tables(script, tables(layouts))
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
