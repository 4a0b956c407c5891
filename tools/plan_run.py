"""Plan a run: memory, traffic and time of every layout of a recipe on a cluster, and the command of the best one.

It needs no GPU and no memory for the model, and takes seconds on a login node. See docs/planning.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from typing import TYPE_CHECKING, Any

from ctxlm_ds.console import run_command

if TYPE_CHECKING:
    from ctxlm_ds.planning.hardware import Cluster
    from ctxlm_ds.planning.plan import Plan
    from ctxlm_ds.planning.search import Search
    from ctxlm_ds.recipe.schema import RunConfig

OFFLOAD = "zero3-offload"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", metavar="RECIPE", help="recipe: a path, or a shipped one's name")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="change its settings")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="M", help="GPUs of each node (default: 8)")
    parser.add_argument("--world", type=int, metavar="W", help="number of GPUs instead of --nodes")
    parser.add_argument(
        "--gpu", metavar="TYPE", help="V100-32, A100-40, A100-80, H100, H200, or a YAML file that describes another"
    )
    parser.add_argument(
        "--inter-node-gbps", type=float, metavar="G", help="Gbit/s from a node to others (default: as NVIDIA's servers)"
    )
    parser.add_argument("--nvlink-gb-per-s", type=float, metavar="G", help="GB/s between a node's GPUs, both ways")
    parser.add_argument(
        "--deepspeed-config", metavar="JSON", help="plan with this DeepSpeed JSON only (default: zero0 to zero3)"
    )
    parser.add_argument("--all", action="store_true", help="show every layout that fits, and the others by reason")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--published", action="store_true", help="compare predictions with published runs")
    return parser


def build_cluster(args: argparse.Namespace) -> Cluster:
    """Return the cluster of the options; ConfigError if it is impossible."""
    from dataclasses import replace

    from ctxlm_ds.errors import ConfigError
    from ctxlm_ds.planning.hardware import Cluster, find_gpu

    if args.gpu is None:
        raise ConfigError("--gpu is missing: V100-32, A100-40, A100-80, H100, H200, or a YAML file")
    gpu = find_gpu(args.gpu)
    changes = {"inter_node_gbit_per_s": args.inter_node_gbps, "nvlink_gb_per_s": args.nvlink_gb_per_s}
    for name, value in changes.items():
        if value is not None and value <= 0:
            raise ConfigError(f"{name}: {value:g}: expected more than 0")
    gpu = replace(gpu, **{name: value for name, value in changes.items() if value is not None})
    nodes, each = args.nodes, args.gpus_per_node
    if args.world is not None:
        each = min(each, args.world)
        if each < 1 or args.world % each:
            raise ConfigError(f"--world {args.world}: not a multiple of --gpus-per-node {each}")
        nodes = args.world // each
    if nodes < 1 or each < 1:
        raise ConfigError(f"--nodes {nodes} x --gpus-per-node {each}: expected at least one GPU")
    return Cluster(gpu, nodes, each)


def load_recipe(args: argparse.Namespace, cluster: Cluster) -> RunConfig:
    """Return the recipe; ConfigError if there is none, or the GPU does not have its precision."""
    from ctxlm_ds.errors import ConfigError
    from ctxlm_ds.recipe.load import load_config

    if args.config is None:
        raise ConfigError("--config is missing: a recipe's path or a shipped one's name (or --published)")
    config = load_config(args.config, args.set)
    if config.training.precision == "bf16" and not cluster.gpu.has_bf16:
        raise ConfigError(
            f"training.precision: {cluster.gpu.name} has no bf16; add --set training.precision=fp16 "
            "(and training.grad_accum_dtype if it is bf16)"
        )
    return config


def search(config: RunConfig, cluster: Cluster, deepspeed: str | None) -> Search:
    """Plan every layout with the shipped JSON of its ZeRO stage, or with the given one."""
    from ctxlm_ds.planning.plan import Planner
    from ctxlm_ds.planning.search import search_layouts
    from ctxlm_ds.recipe.deepspeed import load_deepspeed_json

    jsons = None
    if deepspeed is not None:
        settings = load_deepspeed_json(deepspeed)
        jsons = {int(settings.get("zero_optimization", {}).get("stage", 0)): settings}
    return search_layouts(Planner(config, cluster, jsons))


def recommend(args: argparse.Namespace, config: RunConfig, cluster: Cluster, found: Search) -> tuple[Plan, str]:
    """Return the recommended plan and its command; ConfigError with the nearest remedy if nothing fits."""
    from ctxlm_ds.planning.layouts import launch_command
    from ctxlm_ds.planning.search import require_plan

    offloaded = None
    if not found.plans and args.deepspeed_config is None:
        offloaded = search(config, cluster, OFFLOAD)
    best = require_plan(found, cluster, offloaded)
    deepspeed = args.deepspeed_config or f"zero{best.layout.zero_stage}"
    changes = [*args.set, *best.layout.settings(config)]
    command = launch_command(args.config, deepspeed, changes, cluster.num_nodes, cluster.gpus_per_node)
    return best, command


def show_table(columns: tuple[str, ...], rows: list[list[str]], title: str) -> None:
    from ctxlm_ds.planning.report import text_table

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join([title, *text_table(columns, rows, width)]))


def show_search(args: argparse.Namespace, config: RunConfig, cluster: Cluster, found: Search) -> None:
    from ctxlm_ds.planning.hardware import GIB
    from ctxlm_ds.planning.measure import with_vocabulary
    from ctxlm_ds.planning.report import COLUMNS, describe_recommendation, describe_refusals, plan_row

    best, command = recommend(args, config, cluster, found)
    if config.model.vocab_size is None:
        size = with_vocabulary(config.model).vocab_size
        print(f"model.vocab_size is not set; planned with {size:,}, the published vocabulary of {config.model.family}")
    plans = found.plans if args.all else found.best_of_each()
    title = (
        f"{config.name} on {cluster.num_nodes} x {cluster.gpus_per_node} {cluster.gpu.name} "
        f"({cluster.usable_bytes / GIB:.1f} GiB per GPU to plan with): {len(plans)} of {len(found.plans)} layouts"
        + (" that fit" if args.all else " that fit, the fastest of each tp, pp and ZeRO stage (--all shows every one)")
    )
    show_table(COLUMNS, [plan_row(plan) for plan in plans], title)
    refusals = describe_refusals(found, cluster.usable_bytes)
    if args.all:
        print("\n".join(refusals))
    elif refusals:
        total = len(found.too_large) + sum(refused.count for refused in found.refused.values())
        print(f"{total} layouts do not fit or are not possible (--all shows why)")
    print("\n".join(describe_recommendation(best, command, config)))


def show_published(as_json: bool) -> None:
    from ctxlm_ds.planning.published import published_runs

    rows: list[list[str]] = []
    records: list[dict[str, Any]] = []
    for run in published_runs():
        predicted = run.predicted()
        ratio = predicted / run.published
        records.append(
            {"run": run.name, "source": run.source, "unit": run.unit, "published": run.published,
             "predicted": predicted, "ratio": ratio}
        )  # fmt: skip
        rows.append([run.name, run.source, run.unit, f"{run.published:.3g}", f"{predicted:.3g}", f"{ratio:.2f}"])
    if as_json:
        print(json.dumps(records, indent=1))
        return
    show_table(("run", "source", "unit", "published", "predicted", "ratio"), rows, "published runs")


def main() -> None:
    args = build_parser().parse_args()
    if args.published:
        show_published(args.json)
        return
    cluster = build_cluster(args)
    config = load_recipe(args, cluster)
    found = search(config, cluster, args.deepspeed_config)
    if not args.json:
        show_search(args, config, cluster, found)
        return
    from ctxlm_ds.planning.report import search_as_dict

    _, command = recommend(args, config, cluster, found)
    plans = found.plans if args.all else found.best_of_each()
    print(json.dumps(search_as_dict(found, plans, command, cluster), indent=1))


if __name__ == "__main__":
    run_command(main)
