"""Plan a run: memory, traffic and time of every layout of a recipe on a cluster, and the command of the best one.

It needs no GPU and no memory for the model, and takes seconds on a login node. See docs/planning.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace

from ctxlm_ds.apps.plan.layouts import launch_command
from ctxlm_ds.apps.plan.report import describe_search, search_as_dict
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.hardware import Cluster, find_gpu
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, metavar="RECIPE", help="recipe: a path, or a shipped one's name")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="change its settings")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="M", help="GPUs of each node (default: 8)")
    parser.add_argument("--world", type=int, metavar="W", help="number of GPUs instead of --nodes")
    parser.add_argument(
        "--gpu", required=True, metavar="V100-32|A100-40|A100-80|H100|H200|FILE", help="or a YAML file of another GPU"
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
    return parser


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


def load_recipe(args: argparse.Namespace, cluster: Cluster) -> RunConfig:
    """Return the recipe; ConfigError if the GPU does not have its precision."""
    config = load_config(args.config, args.set)
    if config.teacher.path is not None:
        from ctxlm_ds.export.teacher import with_teacher

        config = with_teacher(config)
    if config.training.precision == "bf16" and not cluster.gpu.has_bf16:
        raise ConfigError(
            f"training.precision: {cluster.gpu.name} has no bf16; add --set training.precision=fp16 "
            "(and training.grad_accum_dtype if it is bf16)"
        )
    return config


def main() -> None:
    args = build_parser().parse_args()
    cluster = build_cluster(args)
    config = load_recipe(args, cluster)
    # These import torch; --help and wrong options are answered before.
    from ctxlm_ds.apps.plan.plan import Planner, load_jsons
    from ctxlm_ds.apps.plan.search import require_plan, search_layouts

    jsons = load_jsons(args.deepspeed_config) if args.deepspeed_config else None
    found, offloaded = search_layouts(Planner(config, cluster, jsons)), None
    if not found.plans and jsons is None:
        offloaded = search_layouts(Planner(config, cluster, load_jsons("zero3-offload")))
    best = require_plan(found, cluster, offloaded).layout
    deepspeed = args.deepspeed_config or f"zero{best.zero_stage}"
    command = launch_command(
        args.config, deepspeed, [*args.set, *best.settings(config.parallel.pipeline_layers)], cluster
    )
    if args.json:
        print(json.dumps(search_as_dict(found, cluster, command, args.all), indent=1))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(describe_search(found, config, cluster, command, args.all, width)))
