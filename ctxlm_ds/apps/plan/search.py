"""All layouts of a recipe on a cluster: plans of the possible ones, the others by reason, one recommendation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from ctxlm_ds.apps.plan.layouts import Layout
from ctxlm_ds.apps.plan.plan import Plan, Planner
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.hardware import GIB, Cluster
from ctxlm_ds.recipe.layout import PIPELINE_ZERO_STAGES, layout_problems

NEARLY_AS_FAST = 1.03
"""A simpler layout is recommended if its step takes at most this much longer than the fastest one's."""
MICRO_BATCHES = tuple(2**power for power in range(10))
LONG_ROW = 2_048
"""Ranks share the positions of longer rows, and of any if the batch has fewer rows than ranks: a micro-batch of shorter
rows fits and fills a GPU without exchanges."""


@dataclass(slots=True)
class Refused:
    """Layouts that are not possible for one reason."""

    example: Layout
    text: str
    """The reason with the example's numbers."""
    count: int = 0


@dataclass(slots=True)
class Search:
    """Result of a search."""

    plans: list[Plan] = field(default_factory=list)
    """Plans that fit, fastest first."""
    too_large: list[tuple[Layout, int]] = field(default_factory=list)
    """Layouts that do not fit, with the bytes they need, least first."""
    refused: dict[str, Refused] = field(default_factory=dict)

    @property
    def recommended(self) -> Plan | None:
        """The simplest plan that is nearly as fast as the fastest; ZeRO 3 only if no other stage fits."""
        if not self.plans:
            return None
        # The model does not count the Python time of stage 3's hooks around every module.
        pool = [plan for plan in self.plans if plan.layout.zero_stage < 3] or self.plans
        fastest = pool[0].time.total
        return min((plan for plan in pool if plan.time.total <= NEARLY_AS_FAST * fastest), key=_complexity)

    def best_of_each(self) -> list[Plan]:
        """Return the fastest plan of each (context, tensor, pipeline, ZeRO stage), fastest first."""
        best: dict[tuple[int, ...], Plan] = {}
        for plan in self.plans:
            one = plan.layout
            best.setdefault((one.context, one.tensor, one.pipeline, one.zero_stage), plan)
        return list(best.values())


def search_layouts(planner: Planner) -> Search:
    """Plan every layout on the planner's cluster."""
    found, cluster = Search(), planner.cluster
    for layout in candidates(planner):
        config = planner.recipe_of(layout)
        problem = next(layout_problems(config, cluster.world_size, layout.zero_stage), None)
        if problem is not None:
            found.refused.setdefault(problem.path, Refused(layout, problem.text)).count += 1
            continue
        needed = planner.memory(layout).total
        if needed > cluster.usable_bytes:
            found.too_large.append((layout, needed))
        else:
            found.plans.append(planner.weigh(layout))
    found.plans.sort(key=lambda plan: (plan.time.total, *_complexity(plan)))
    found.too_large.sort(key=lambda item: item[1])
    return found


def candidates(planner: Planner) -> Iterator[Layout]:
    """Yield layouts: tensor x context within a node, stages up to the layers, micro-batches that divide."""
    config, world_size = planner.config, planner.cluster.world_size
    inside, rows = _divisors(planner.cluster.gpus_per_node), config.training.global_batch_size
    for tensor, context, pipeline in product(inside, inside, _divisors(world_size)):
        data, left = divmod(world_size, tensor * context * pipeline)
        if left or pipeline > config.model.num_blocks or tensor * context > planner.cluster.gpus_per_node:
            continue
        if context > 1 and config.data.seq_length <= LONG_ROW and data * context <= rows:
            continue
        # 1 if none divides, so that the refusal is counted.
        micro_batches = [size for size in MICRO_BATCHES if rows % (data * size) == 0] or [1]
        splits = (False, True) if tensor > 1 else (False,)
        # 0 only in fp32 (recipe/deepspeed_rules.py).
        stages = [stage for stage in sorted(planner.zero) if stage > 0 or config.training.precision == "fp32"]
        if pipeline > 1:
            stages = [stage for stage in stages if stage in PIPELINE_ZERO_STAGES]
        for rest in product(stages, micro_batches, (False, True), splits):
            yield Layout(data, tensor, pipeline, *rest, context)


def require_plan(found: Search, cluster: Cluster, offloaded: Search | None = None) -> Plan:
    """Return the recommended plan. Raises ConfigError with the missing memory and a remedy if nothing fits.

    `offloaded` is the search with zero3-offload, for the message.
    """
    plan = found.recommended
    if plan is not None:
        return plan
    if not found.too_large:
        reasons = "; ".join(f"{path}: {refused.text}" for path, refused in found.refused.items())
        raise ConfigError(f"no layout is possible on {cluster.world_size} GPUs: {reasons}")
    (layout, needed), usable = found.too_large[0], cluster.usable_bytes
    raise ConfigError(
        f"no layout fits: the smallest ({layout}) needs {needed / GIB:.1f} GiB of a GPU, and {cluster.gpu.name} has "
        f"{usable / GIB:.1f} GiB to plan with: "
        f"{(needed - usable) / GIB:.1f} GiB are missing; {_remedy(needed / usable, offloaded)}"
    )


def _remedy(factor: float, offloaded: Search | None) -> str:
    larger = f"take GPUs of more memory, or about {math.ceil(factor)} times as many"
    if offloaded is None:
        return larger
    if offloaded.recommended is not None:
        fitting = offloaded.recommended.memory.total / GIB
        return f"with --deepspeed-config zero3-offload it fits ({fitting:.1f} GiB a GPU); or {larger}"
    least = offloaded.too_large[0][1] / GIB if offloaded.too_large else math.inf
    return f"{larger} (even with zero3-offload it needs {least:.1f} GiB)"


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _complexity(plan: Plan) -> tuple[int, int, bool, int, float]:
    layout = plan.layout
    parts = layout.tensor * layout.context * layout.pipeline
    return parts, layout.zero_stage, layout.recompute, layout.sequence_parallel, plan.time.total
