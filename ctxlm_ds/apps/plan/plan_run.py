"""Plan a run: memory, traffic and time of every layout of a recipe on a cluster, and the command of the best one.

It needs no GPU and no memory for the model, and takes seconds on a login node. See docs/planning.md.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.apps.plan.check_run import with_tokenizer_size
from ctxlm_ds.apps.plan.layouts import launch_command
from ctxlm_ds.console import aligned
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.hardware import GIB, Cluster, find_gpu
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.phases import CHANGEABLE, run_phases
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.words import STEPS_FOLLOW, parse_words
from ctxlm_ds.registry import FAMILIES

if TYPE_CHECKING:
    from ctxlm_ds.apps.plan.plan import Plan
    from ctxlm_ds.apps.plan.search import Search

COLUMNS = (
    "dp", "cp", "tp", "pp", "zero", "micro", "recompute", "seq.par", "params", "grads", "optim", "activ", "buffers",
    "GiB/GPU", "dp MB", "cp MB", "tp MB", "pp MB", "s/step", "MFU", "days",
)  # fmt: skip
NARROW_COLUMNS = ("dp", "cp", "tp", "pp", "zero", "micro", "recompute", "seq.par", "GiB/GPU", "s/step", "MFU", "days")
"""Columns that fit into 80 characters."""
WIDE_TERMINAL = 175


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--config", required=True, metavar="RECIPE", help="recipe: a path, or a shipped one's name")
    add("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="change its settings")
    add("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    add("--gpus-per-node", type=int, default=8, metavar="M", help="GPUs of each node (default: 8)")
    add("--world", "--ranks", type=int, metavar="W", help="number of GPUs instead of --nodes")
    add("--gpu", metavar="V100-32|A100-40|A100-80|H100|H200|FILE", help="or a YAML file of another GPU; required")
    speed = "Gbit/s from a node to others (default: as NVIDIA's servers)"
    add("--inter-node-gbps", type=float, metavar="G", help=speed)
    add("--nvlink-gb-per-s", type=float, metavar="G", help="GB/s between a node's GPUs, both ways")
    add("--deepspeed-config", metavar="JSON", help="plan with this DeepSpeed JSON only (default: zero0 to zero3)")
    budget = "propose size, batch, rate and tokens for so much text, by published laws"
    add("--budget", type=parse_budget, metavar="words=N,hours=H[,gpu=NAME]", help=budget)
    add("--ladder", type=Path, metavar="JSON", help="with --budget: a law of your runs, of tools/scaling.py")
    add("--all", action="store_true", help="show every layout that fits, and the others by reason")
    add("--json", action="store_true", help="print JSON")
    return parser


def parse_budget(text: str) -> dict[str, Any]:
    """Return words, hours and gpu of --budget."""
    found: dict[str, Any] = dict(part.partition("=")[::2] for part in text.split(","))
    try:
        if not {"words", "hours"} <= set(found) <= {"words", "hours", "gpu"}:
            raise ValueError
        found |= {"words": float(parse_words(found["words"])), "hours": float(found["hours"])}
        if not (0 < found["words"] < math.inf and 0 < found["hours"] < math.inf):
            raise ValueError
    except ValueError:
        expected = "words=100M,hours=24 with numbers above 0, and gpu=NAME if you like"
        raise argparse.ArgumentTypeError(f"{text}: expected {expected}") from None
    return found


def build_cluster(args: argparse.Namespace) -> Cluster:
    """Return the cluster of the options; ConfigError if it is impossible."""
    gpu = find_gpu(args.gpu)
    for name, speed in (("inter_node_gbit_per_s", args.inter_node_gbps), ("nvlink_gb_per_s", args.nvlink_gb_per_s)):
        if speed is not None and speed <= 0:
            raise ConfigError(f"{name}: {speed:g}: expected more than 0")
        gpu = gpu if speed is None else replace(gpu, **{name: speed})
    nodes, each = args.nodes, args.gpus_per_node
    if args.world is not None:
        each = min(each, args.world)
        if each < 1 or args.world % each:
            raise ConfigError(f"--world {args.world}: not a multiple of --gpus-per-node {each}")
        nodes = args.world // each
    if nodes < 1 or each < 1:
        raise ConfigError(f"--nodes {nodes} x --gpus-per-node {each}: expected at least one GPU")
    return Cluster(gpu, nodes, each)


def load_recipes(args: argparse.Namespace, cluster: Cluster) -> list[RunConfig]:
    """Return the recipe of each phase with its tokenizer's vocabulary.

    Raises ConfigError if the GPU does not have its precision, or its steps follow from a dataset.
    """
    found = []
    for phase in run_phases(load_config(args.config, args.set)):
        config = with_tokenizer_size(phase.config)
        if phase.count > 1:
            config = config.model_copy(update={"name": f"{config.name}, {phase.describe()}"})
        if config.training.max_steps == STEPS_FOLLOW and phase.phase.hours is None:
            raise ConfigError(
                f"training.max_words: {config.training.max_words:,} words give the steps only when the run starts; add "
                "--set training.max_words=null training.max_steps=N (about words x tokens of a word / tokens of a step)"
            )
        if config.teacher.path is not None:
            from ctxlm_ds.export.teacher import with_teacher

            config = with_teacher(config)
        if config.training.precision == "bf16" and not cluster.gpu.has_bf16:
            raise ConfigError(
                f"training.precision: {cluster.gpu.name} has no bf16; add --set training.precision=fp16 "
                "(and training.grad_accum_dtype if it is bf16)"
            )
        found.append(config)
    return found


def plan_row(plan: Plan) -> dict[str, str]:
    """Return a plan's cells by column: memory in GiB, traffic in MB that a rank sends per step."""
    layout, memory = plan.layout, plan.memory
    parts = (memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.buffers, memory.total)
    cells = [
        *map(str, (layout.data, layout.context, layout.tensor, layout.pipeline)),
        *map(str, (layout.zero_stage, layout.micro_batch_size)),
        *("yes" if value else "-" for value in (layout.recompute, layout.sequence_parallel)),
        *(f"{part / GIB:.2f}" for part in parts),
        *(f"{plan.axis_bytes(axis) / 1e6:,.0f}" for axis in ("data", "context", "tensor", "pipeline")),
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
    found: Search, name: str, max_steps: int, cluster: Cluster, command: str, show_all: bool, width: int | None = None
) -> list[str]:
    """Return what the planner prints: a table of plans, the other layouts by reason, and the recommendation.

    `name` is the recipe's; `command` starts the recommended plan; without `show_all` the fastest layout per cp, tp, pp
    and ZeRO stage is listed.
    """
    lines, usable = [], f"{cluster.usable_bytes / GIB:.1f} GiB"
    plans = found.plans if show_all else found.best_of_each()
    which = "" if show_all else ", the fastest of each cp, tp, pp and ZeRO stage (--all shows every one)"
    lines += [
        f"{name} on {cluster.num_nodes} x {cluster.gpus_per_node} {cluster.gpu.name} "
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
        lines += describe_recommendation(found.recommended, command, max_steps)
    return lines


def describe_recommendation(plan: Plan, command: str, max_steps: int) -> list[str]:
    """Return the recommended layout, its time and memory by part, and the command that starts it."""
    time = plan.time
    parts = {
        "computing": time.compute, "tensor parallelism": time.tensor, "context parallelism": time.context,
        "stage transfers": time.pipeline, "pipeline idle": time.bubble, "data parallelism": time.data,
        "update": time.update,
    }  # fmt: skip
    shares = ", ".join(f"{name} {100 * part / time.total:.0f} %" for name, part in parts.items() if part)
    memory = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in asdict(plan.memory).items())
    sent: defaultdict[str, float] = defaultdict(float)
    for message in plan.messages:
        sent[f"{message.axis} {message.operation.replace('_', '-')}"] += message.wire_bytes / 1e6
    traffic = ", ".join(f"{name} {size:,.1f} MB" for name, size in sent.items())
    length = f"{plan.days:.3g} days for {max_steps:,} steps"
    length = length if max_steps < STEPS_FOLLOW else "for as many steps as its hours allow"
    return [
        f"recommended: {plan.layout}",
        f"  {plan.memory.total / GIB:.1f} GiB per GPU, {time.total:.3g} s per step ({shares}), {length}",
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


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    args.gpu = (args.budget or {}).get("gpu", args.gpu)
    if args.gpu is None:
        parser.error("the following arguments are required: --gpu, or gpu=NAME in --budget")
    if args.budget is None and args.ladder is not None:
        parser.error("--ladder: only with --budget")
    if args.budget is not None and (args.json or args.all or args.deepspeed_config):
        parser.error("--budget: without --json, --all and --deepspeed-config")
    cluster = build_cluster(args)
    if args.budget is not None:
        from ctxlm_ds.apps.plan.budget import PUBLISHED, Budget, describe, read_ladder

        laws = PUBLISHED if args.ladder is None else (*PUBLISHED, read_ladder(args.ladder))
        words, first = args.budget["words"], load_recipes(args, cluster)[0]
        proposals = Budget(first, cluster, words, args.budget["hours"], laws).proposals()
        print("\n".join(describe(proposals, words, laws)))
        return
    found = [plan_recipe(args, cluster, config, number) for number, config in enumerate(load_recipes(args, cluster))]
    if args.json:
        print(json.dumps(found[0] | ({"phases": found} if len(found) > 1 else {}), indent=1))


def plan_recipe(args: argparse.Namespace, cluster: Cluster, config: RunConfig, number: int) -> dict[str, Any]:
    """Search the layouts of phase `number` of a recipe; print what was found, or return it if JSON is asked for."""
    # These import torch; --help and wrong options are answered before.
    from ctxlm_ds.apps.plan.plan import Planner, load_jsons
    from ctxlm_ds.apps.plan.search import require_plan, search_layouts

    jsons = load_jsons(args.deepspeed_config) if args.deepspeed_config else None
    found, offloaded = search_layouts(Planner(config, cluster, jsons)), None
    if not found.plans and jsons is None:
        offloaded = search_layouts(Planner(config, cluster, load_jsons("zero3-offload")))
    best = require_plan(found, cluster, offloaded)
    deepspeed = args.deepspeed_config or f"zero{best.layout.zero_stage}"
    place = f"phases.{number}.set." if number else ""  # of what each phase may set
    settings = [*args.set, *(place * one.startswith(CHANGEABLE) + one
                             for one in best.layout.settings(config.parallel.pipeline_layers))]  # fmt: skip
    command = launch_command(args.config, deepspeed, settings, cluster)
    if args.json:
        return {
            "cluster": {**asdict(cluster), "usable_bytes": cluster.usable_bytes},
            "plans": [plan_as_dict(plan) for plan in (found.plans if args.all else found.best_of_each())],
            "recommended": plan_as_dict(best),
            "command": command,
            "too_large": len(found.too_large),
            "refused": {path: {"count": item.count, "reason": item.text} for path, item in found.refused.items()},
        }
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if config.model.vocab_size is None:
        size = FAMILIES.get(config.model.family).vocab_size
        print(f"model.vocab_size is not set; planned with {size:,}, the published vocabulary of {config.model.family}")
    steps = config.training.max_steps
    print("\n".join(describe_search(found, config.name, steps, cluster, command, args.all, width)))
    return {}
