"""Layouts of the published runs on common clusters, for the scripts in slurm/published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from ctxlm_ds.planning.hardware import GIB, GPUS, Cluster, Gpu, find_gpu
from ctxlm_ds.planning.plan import Plan, Planner
from ctxlm_ds.planning.report import text_table
from ctxlm_ds.planning.search import search_layouts
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig

GPUS_PER_NODE = 8
MANY = (1, 4, 16, 64, 128)
FEW = (1, 2, 4, 8)
NO_BF16 = ("training.precision=fp16",)
HEADER = ("GPU", "nodes", "dp", "tp", "pp", "zero", "micro", "recompute", "precision", "GiB/GPU", "s/step", "days")


@dataclass(frozen=True)
class ReadyRun:
    """One script of slurm/published."""

    script: str
    recipes: tuple[str, ...]
    """One per phase."""
    nodes: tuple[int, ...]
    """Numbers of nodes in its table; more than FEW if the batch has enough rows."""


READY_RUNS = (
    ReadyRun("bert-base-lamb", ("bert-base-lamb-phase1", "bert-base-lamb-phase2"), MANY),
    ReadyRun("bert-large-lamb", ("bert-large-lamb-phase1", "bert-large-lamb-phase2"), MANY),
    ReadyRun("roberta-base", ("roberta-base",), MANY),
    ReadyRun("roberta-large", ("roberta-large",), MANY),
    ReadyRun("gpt1", ("gpt1",), FEW),
    ReadyRun("gpt2-small", ("gpt2-small",), MANY[:-1]),
    ReadyRun("gpt2-medium", ("gpt2-medium",), MANY[:-1]),
)


@dataclass(frozen=True)
class ReadyLayout:
    """A recipe on a cluster, and the plan for it."""

    recipe: str
    gpu: Gpu
    nodes: int
    plan: Plan

    @property
    def words(self) -> str:
        """A line of layouts.txt: recipe, GPU, nodes, DeepSpeed JSON, settings that differ from shipped recipes."""
        settings = self.plan.layout.settings(_config(self.recipe, self.gpu))
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
    return Planner(_config(recipe, gpu), Cluster(gpu, nodes, GPUS_PER_NODE))


def ready_layout(recipe: str, gpu_name: str, nodes: int) -> ReadyLayout | None:
    """Return the layout that the planner recommends, or None if nothing fits."""
    gpu = find_gpu(gpu_name)
    plan = search_layouts(planner_of(recipe, gpu, nodes)).recommended
    return None if plan is None else ReadyLayout(recipe, gpu, nodes, plan)


def ready_layouts(run: ReadyRun) -> Iterator[ReadyLayout]:
    """Yield every line of a script, phase by phase, in the order of the GPUs."""
    for recipe in run.recipes:
        for gpu in GPUS:
            for nodes in run.nodes:
                layout = ready_layout(recipe, gpu.name, nodes)
                if layout is not None:
                    yield layout


def table(layouts: Sequence[ReadyLayout]) -> list[str]:
    """Return the lines of a table of one recipe."""
    return text_table(HEADER, [layout.row for layout in layouts])
