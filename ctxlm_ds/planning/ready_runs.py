"""Layouts of the published runs on common clusters, for the scripts in slurm/published.

In: recipes, GPUs, numbers of nodes. Out: layouts.txt, which the scripts read, and the table that each shows.
Not here: the planner (plan.py, search.py), writing files (tools/write_published_scripts.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from ctxlm_ds.planning.hardware import GIB, GPUS, Cluster, Gpu, find_gpu
from ctxlm_ds.planning.plan import JsonByStage, Plan, Planner
from ctxlm_ds.planning.report import text_table
from ctxlm_ds.planning.search import search_layouts
from ctxlm_ds.recipe.deepspeed import load_deepspeed_json
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig

GPUS_PER_NODE = 8
MANY = (1, 4, 16, 64, 128)
FEW = (1, 2, 4, 8)
ZERO_STAGES = (0, 1, 2, 3)
NO_BF16 = ("training.precision=fp16",)


@dataclass(frozen=True)
class ReadyRun:
    """One script of slurm/published."""

    script: str
    recipes: tuple[str, ...]
    """One a phase."""
    nodes: tuple[int, ...]
    """Numbers of nodes in its table; more than FEW where the batch has rows for them."""


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
    gpu: str
    nodes: int
    plan: Plan
    settings: tuple[str, ...]
    """`a.b=c` for --set."""

    @property
    def words(self) -> str:
        """A line of layouts.txt: recipe, GPU, nodes, DeepSpeed JSON, settings."""
        return " ".join([self.recipe, self.gpu, str(self.nodes), self.deepspeed, *self.settings])

    @property
    def deepspeed(self) -> str:
        """As --deepspeed_config takes it."""
        return f"zero{self.plan.layout.zero_stage}"


def planner_of(recipe: str, gpu: Gpu, nodes: int) -> Planner:
    """The planner of a published recipe on equal nodes of eight GPUs."""
    return Planner(_config(recipe, gpu), Cluster(gpu, nodes, GPUS_PER_NODE), _jsons())


@cache
def _jsons() -> JsonByStage:
    return {stage: load_deepspeed_json(f"zero{stage}") for stage in ZERO_STAGES}


@cache
def _config(recipe: str, gpu: Gpu) -> RunConfig:
    return load_config(recipe, () if gpu.has_bf16 else NO_BF16)


def ready_layout(recipe: str, gpu_name: str, nodes: int) -> ReadyLayout | None:
    """What the planner recommends; None where nothing fits."""
    gpu = find_gpu(gpu_name)
    plan = search_layouts(planner_of(recipe, gpu, nodes)).recommended
    return None if plan is None else describe_layout(recipe, gpu, nodes, plan)


def describe_layout(recipe: str, gpu: Gpu, nodes: int, plan: Plan) -> ReadyLayout:
    """Describe a plan with the settings that its scripts give."""
    config = _config(recipe, gpu)
    settings = [setting for setting in plan.layout.settings(config) if not _is_default(setting)]
    return ReadyLayout(recipe, gpu.name, nodes, plan, (*(() if gpu.has_bf16 else NO_BF16), *settings))


def _is_default(setting: str) -> bool:
    """Whether every shipped recipe has it so: the words of a job stay short."""
    name, _, value = setting.partition("=")
    return name != "training.micro_batch_size" and value in ("1", "false")


def ready_layouts(run: ReadyRun) -> Iterator[ReadyLayout]:
    """Every line of a script, phase by phase, the GPUs in their order."""
    for recipe in run.recipes:
        for gpu in GPUS:
            for nodes in run.nodes:
                layout = ready_layout(recipe, gpu.name, nodes)
                if layout is not None:
                    yield layout


HEADER = ("GPU", "nodes", "dp", "tp", "pp", "zero", "micro", "recompute", "precision", "GiB/GPU", "s/step", "days")


def table(layouts: Sequence[ReadyLayout]) -> list[str]:
    """Lines of a table of one recipe."""
    return text_table(HEADER, [_row(layout) for layout in layouts])


def _row(ready: ReadyLayout) -> list[str]:
    plan, layout = ready.plan, ready.plan.layout
    numbers = (ready.nodes, layout.data, layout.tensor, layout.pipeline, layout.zero_stage, layout.micro_batch_size)
    return [
        ready.gpu, *map(str, numbers), "yes" if layout.recompute else "-",
        "fp16" if NO_BF16[0] in ready.settings else "bf16", f"{plan.memory.total / GIB:.1f}",
        f"{plan.time.total:.3g}", f"{plan.days:.3g}",
    ]  # fmt: skip
