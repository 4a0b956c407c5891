"""Plans for people and programs: a table (rich on a terminal, plain columns in a file), the command, JSON.

In: a Search, published runs. Out: text, dictionaries. Not here: printing (tools/plan_run.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ctxlm_ds.console import aligned
from ctxlm_ds.planning.hardware import GIB, Cluster
from ctxlm_ds.planning.layouts import Layout
from ctxlm_ds.planning.plan import Plan
from ctxlm_ds.planning.search import Search
from ctxlm_ds.recipe.schema import RunConfig

if TYPE_CHECKING:
    from rich.table import Table

AXES = ("data", "tensor", "pipeline")
COLUMNS = (
    "dp", "tp", "pp", "zero", "micro", "recompute", "seq.par", "params", "grads", "optim", "activ", "buffers",
    "GiB/GPU", "dp MB", "tp MB", "pp MB", "s/step", "MFU", "days",
)  # fmt: skip
NARROW_COLUMNS = ("dp", "tp", "pp", "zero", "micro", "recompute", "seq.par", "GiB/GPU", "s/step", "MFU", "days")
"""What an ordinary terminal has room for."""
WIDE_TERMINAL = 175


def plan_rows(plans: Sequence[Plan]) -> list[list[str]]:
    """One row of cells a plan, as COLUMNS; memory in GiB, traffic in MB that a rank sends in a step."""
    return [_row(plan) for plan in plans]


def _row(plan: Plan) -> list[str]:
    layout, memory = plan.layout, plan.memory
    parts = (memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.buffers, memory.total)
    return [
        *map(str, (layout.data, layout.tensor, layout.pipeline, layout.zero_stage, layout.micro_batch_size)),
        _yes(layout.recompute),
        _yes(layout.sequence_parallel),
        *(f"{part / GIB:.2f}" for part in parts),
        *(f"{plan.axis_bytes(axis) / 1e6:,.0f}" for axis in AXES),
        f"{plan.time.total:.3g}",
        f"{100 * plan.mfu:.0f} %",
        f"{plan.days:.3g}",
    ]


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns: text to the left, everything else to the right of its column."""
    is_text = [i for i in range(len(columns)) if all(row[i][:1].isalpha() for row in rows if row[i])]
    return aligned([columns, *rows], left=is_text, indent="")


def rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """The same for a terminal of `width` columns, without what a narrow one has no room for."""
    from rich import box
    from rich.table import Table

    kept = list(range(len(columns)))
    if tuple(columns) == COLUMNS and width < WIDE_TERMINAL:
        kept = [columns.index(name) for name in NARROW_COLUMNS]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for index in kept:
        is_text = all(row[index][:1].isalpha() for row in rows)
        table.add_column(columns[index], justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    return table


def describe_refusals(found: Search, usable_bytes: float) -> list[str]:
    """How many layouts cannot be, by reason, each with an example."""
    lines = []
    if found.too_large:
        layout, needed = found.too_large[0]
        lines.append(
            f"{len(found.too_large)} layouts need more than the {usable_bytes / GIB:.1f} GiB of a GPU; the smallest of "
            f"them, {describe_layout(layout)}, {needed / GIB:.1f} GiB"
        )
    for path, refused in sorted(found.refused.items(), key=lambda item: -item[1].count):
        example = describe_layout(refused.example) if refused.example else ""
        lines.append(f"{refused.count} layouts refused ({example}): {path}: {refused.text}")
    return lines


def describe_layout(layout: Layout) -> str:
    """A layout in words."""
    words = [f"dp {layout.data}", f"tp {layout.tensor}", f"pp {layout.pipeline}", f"ZeRO {layout.zero_stage}"]
    words.append(f"micro-batch {layout.micro_batch_size}")
    words += ["recomputation"] if layout.recompute else []
    words += ["sequence parallelism"] if layout.sequence_parallel else []
    return ", ".join(words)


def describe_recommendation(plan: Plan, command: str, config: RunConfig) -> list[str]:
    """The chosen layout, where its time goes, and the command that starts it."""
    time = plan.time
    parts = {
        "computing": time.compute, "tensor parallelism": time.tensor, "stage transfers": time.pipeline,
        "pipeline idle": time.bubble, "data parallelism": time.data, "update": time.update,
    }  # fmt: skip
    shares = ", ".join(f"{name} {100 * part / time.total:.0f} %" for name, part in parts.items() if part)
    return [
        f"recommended: {describe_layout(plan.layout)}",
        f"  {plan.memory.total / GIB:.1f} GiB a GPU, {time.total:.3g} s a step ({shares}), "
        f"{plan.days:.3g} days for {config.training.max_steps:,} steps",
        f"  memory: {_memory_parts(plan)}",
        *(f"  sent by a rank in a step: {line}" for line in [_traffic(plan)] if line),
        f"  {command}",
    ]


def _memory_parts(plan: Plan) -> str:
    parts = {name: size / GIB for name, size in asdict(plan.memory).items()}
    return ", ".join(f"{name} {size:.2f} GiB" for name, size in parts.items())


def _traffic(plan: Plan) -> str:
    sent: dict[str, float] = {}
    for message in plan.messages:
        name = f"{message.axis} {message.operation.replace('_', '-')}"
        sent[name] = sent.get(name, 0) + message.wire_bytes / 1e6
    return ", ".join(f"{name} {size:,.1f} MB" for name, size in sent.items())


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """A plan for programs; bytes and seconds."""
    return {
        "layout": asdict(plan.layout),
        "memory_bytes": {**asdict(plan.memory), "total": plan.memory.total},
        "messages": [{**asdict(message), "wire_bytes": message.wire_bytes} for message in plan.messages],
        "step_seconds": {**asdict(plan.time), "total": plan.time.total},
        "mfu": plan.mfu,
        "days": plan.days,
    }


def search_as_dict(found: Search, plans: Sequence[Plan], command: str, cluster: Cluster) -> dict[str, Any]:
    """Everything that the tool prints; `command` starts the recommended plan."""
    best = found.recommended
    return {
        "cluster": {**asdict(cluster), "usable_bytes": cluster.usable_bytes},
        "plans": [plan_as_dict(plan) for plan in plans],
        "recommended": plan_as_dict(best) if best else None,
        "command": command,
        "too_large": len(found.too_large),
        "refused": {path: {"count": item.count, "reason": item.text} for path, item in found.refused.items()},
    }


def _yes(value: bool) -> str:
    return "yes" if value else "-"
