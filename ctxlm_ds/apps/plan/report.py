"""Plans as a table, as text and as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ctxlm_ds.console import aligned
from ctxlm_ds.recipe.hardware import GIB, Cluster
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import FAMILIES

if TYPE_CHECKING:
    from ctxlm_ds.apps.plan.plan import Plan
    from ctxlm_ds.apps.plan.search import Search

COLUMNS = (
    "dp", "tp", "pp", "zero", "micro", "recompute", "seq.par", "params", "grads", "optim", "activ", "buffers",
    "GiB/GPU", "dp MB", "tp MB", "pp MB", "s/step", "MFU", "days",
)  # fmt: skip
NARROW_COLUMNS = ("dp", "tp", "pp", "zero", "micro", "recompute", "seq.par", "GiB/GPU", "s/step", "MFU", "days")
"""Columns that fit into 80 characters."""
WIDE_TERMINAL = 175


def plan_row(plan: Plan) -> dict[str, str]:
    """Return a plan's cells by column: memory in GiB, traffic in MB that a rank sends per step."""
    layout, memory = plan.layout, plan.memory
    parts = (memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.buffers, memory.total)
    cells = [
        *map(str, (layout.data, layout.tensor, layout.pipeline, layout.zero_stage, layout.micro_batch_size)),
        *("yes" if value else "-" for value in (layout.recompute, layout.sequence_parallel)),
        *(f"{part / GIB:.2f}" for part in parts),
        *(f"{plan.axis_bytes(axis) / 1e6:,.0f}" for axis in ("data", "tensor", "pipeline")),
        f"{plan.time.total:.3g}",
        f"{100 * plan.mfu:.0f} %",
        f"{plan.days:.3g}",
    ]
    return dict(zip(COLUMNS, cells, strict=True))


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, text to the left and numbers to the right of their columns."""
    is_text = [i for i in range(len(columns)) if all(row[i][:1].isalpha() for row in rows if row[i])]
    return aligned([columns, *rows], left=is_text, indent="")


def plan_table(plans: Sequence[Plan], width: int | None = None) -> list[str]:
    """Return the lines of a table of plans, with fewer columns on a terminal of less than WIDE_TERMINAL characters."""
    names = NARROW_COLUMNS if width is not None and width < WIDE_TERMINAL else COLUMNS
    return text_table(names, [[row[name] for name in names] for row in map(plan_row, plans)])


def describe_search(
    found: Search, config: RunConfig, cluster: Cluster, command: str, show_all: bool, width: int | None = None
) -> list[str]:
    """Return what the planner prints: a table of plans, the other layouts by reason, and the recommendation.

    `command` starts the recommended plan; without `show_all` the fastest layout per tp, pp and ZeRO stage is listed.
    """
    lines, usable = [], f"{cluster.usable_bytes / GIB:.1f} GiB"
    if config.model.vocab_size is None:
        family = config.model.family
        size = FAMILIES.get(family).vocab_size
        lines.append(f"model.vocab_size is not set; planned with {size:,}, the published vocabulary of {family}")
    plans = found.plans if show_all else found.best_of_each()
    which = "" if show_all else ", the fastest of each tp, pp and ZeRO stage (--all shows every one)"
    lines += [
        f"{config.name} on {cluster.num_nodes} x {cluster.gpus_per_node} {cluster.gpu.name} "
        f"({usable} per GPU to plan with): {len(plans)} of {len(found.plans)} layouts that fit{which}",
        *plan_table(plans, width),
    ]
    impossible = sum(refused.count for refused in found.refused.values())
    if show_all and found.too_large:
        layout, needed = found.too_large[0]
        lines.append(
            f"{len(found.too_large)} layouts need more than the {usable} of a GPU; the smallest of them, {layout}, "
            f"{needed / GIB:.1f} GiB"
        )
    if show_all:
        for path, refused in sorted(found.refused.items(), key=lambda item: -item[1].count):
            lines.append(f"{refused.count} layouts refused ({refused.example}): {path}: {refused.text}")
    elif found.too_large or impossible:
        lines.append(f"{len(found.too_large) + impossible} layouts do not fit or are not possible (--all shows why)")
    if found.recommended:
        lines += describe_recommendation(found.recommended, command, config.training.max_steps)
    return lines


def describe_recommendation(plan: Plan, command: str, max_steps: int) -> list[str]:
    """Return the recommended layout, its time and memory by part, and the command that starts it."""
    time = plan.time
    parts = {
        "computing": time.compute, "tensor parallelism": time.tensor, "stage transfers": time.pipeline,
        "pipeline idle": time.bubble, "data parallelism": time.data, "update": time.update,
    }  # fmt: skip
    shares = ", ".join(f"{name} {100 * part / time.total:.0f} %" for name, part in parts.items() if part)
    memory = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in asdict(plan.memory).items())
    sent: defaultdict[str, float] = defaultdict(float)
    for message in plan.messages:
        sent[f"{message.axis} {message.operation.replace('_', '-')}"] += message.wire_bytes / 1e6
    traffic = ", ".join(f"{name} {size:,.1f} MB" for name, size in sent.items())
    return [
        f"recommended: {plan.layout}",
        f"  {plan.memory.total / GIB:.1f} GiB per GPU, {time.total:.3g} s per step ({shares}), "
        f"{plan.days:.3g} days for {max_steps:,} steps",
        f"  memory: {memory}",
        *([f"  sent by a rank per step: {traffic}"] if traffic else []),
        f"  {command}",
    ]


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan for JSON, in bytes and seconds."""
    return {
        "layout": asdict(plan.layout),
        "memory_bytes": {**asdict(plan.memory), "total": plan.memory.total},
        "messages": [{**asdict(message), "wire_bytes": message.wire_bytes} for message in plan.messages],
        "step_seconds": {**asdict(plan.time), "total": plan.time.total},
        "mfu": plan.mfu,
        "days": plan.days,
    }


def search_as_dict(found: Search, cluster: Cluster, command: str, show_all: bool) -> dict[str, Any]:
    """Return what describe_search prints, for JSON; the arguments are the same."""
    best = found.recommended
    return {
        "cluster": {**asdict(cluster), "usable_bytes": cluster.usable_bytes},
        "plans": [plan_as_dict(plan) for plan in (found.plans if show_all else found.best_of_each())],
        "recommended": plan_as_dict(best) if best else None,
        "command": command,
        "too_large": len(found.too_large),
        "refused": {path: {"count": item.count, "reason": item.text} for path, item in found.refused.items()},
    }
