"""The check of a recipe for a planned run, `ctxlm_ds.pretrain --check`, without torch in this process."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from ctxlm_ds.apps.plan.check_lines import missing_lines, model_lines, run_lines
from ctxlm_ds.checkpoint.progress import read_progress
from ctxlm_ds.console import at_least, program
from ctxlm_ds.errors import TokenizerError
from ctxlm_ds.recipe.check import schedule_warnings
from ctxlm_ds.recipe.deepspeed import build_deepspeed_config
from ctxlm_ds.recipe.json_source import DEFAULT_CONFIG, ZeroSettings, load_deepspeed_json
from ctxlm_ds.recipe.load import dump_config, load_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.teacher_rules import needs_teacher
from ctxlm_ds.training.hooks.hook_setup import check_hooks

logger = logging.getLogger("ctxlm_ds")

MODULE = "ctxlm_ds.pretrain"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; arguments that launchers add (--local_rank) are ignored."""
    parser = argparse.ArgumentParser(prog=program(MODULE), description="Pretrain from a recipe.", allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="RECIPE", help="recipe: a path or the name of a shipped one")
    parser.add_argument("--deepspeed_config", metavar="JSON", help="DeepSpeed JSON: a path or a name in ds_configs/")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="override settings")
    ranks_help = "start N ranks on this machine; with --check: number of ranks of the planned run"
    parser.add_argument("--ranks", type=at_least(1), default=1, metavar="N", help=ranks_help)
    parser.add_argument("--world-size", type=at_least(1), metavar="N", help="with --check: the same as --ranks")
    parser.add_argument("--check", action="store_true", help="only check the recipe and describe the run in brief")
    parser.add_argument("--print", action="store_true", help="with --check: print the resolved recipe instead")
    parser.add_argument("--wait-for-lock", type=float, default=90.0, metavar="S", help="seconds to wait for a live run")
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def check_only(arguments: argparse.Namespace) -> None:
    """Check a recipe for a planned number of ranks without importing torch."""
    world_size = arguments.world_size or arguments.ranks
    config = load_config(arguments.config, arguments.set, world_size)
    if needs_teacher(config.objective) and config.teacher.path is not None:
        from ctxlm_ds.export.teacher import with_teacher

        config = with_teacher(config)
    deepspeed = load_deepspeed_json(str(arguments.deepspeed_config or config.deepspeed or DEFAULT_CONFIG))
    zero = deepspeed_settings(arguments, config, world_size).get("zero_optimization") or {}
    deepspeed["zero_optimization"] = zero
    check_hooks(config.logging)
    if arguments.print:
        sys.stdout.write(dump_config(config))
        return
    config, run_dir = _with_vocabulary(config), config.directory
    progress = read_progress(run_dir, config)
    for line in schedule_warnings(config.schedule, config.training.max_steps):
        logger.warning("%s", line)
    lines = run_lines(config, ZeroSettings.of_json(deepspeed).stage, world_size, run_dir) + missing_lines(config)
    lines += [] if progress is None else [f"  {progress.describe()}"]
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()
    changes = ["--set", *arguments.set] if arguments.set else []
    plan = f"ctxlm plan {shlex.join(['--config', arguments.config, *changes])}"
    for_gpus = getattr(arguments, "gpus_per_node", None) is not None  # of `ctxlm submit`, for other machines
    sys.stdout.writelines(f"{line}\n" for line in model_lines(config, deepspeed, world_size, plan, for_gpus))


def _with_vocabulary(config: RunConfig) -> RunConfig:
    """Return the recipe with the size of its tokenizer's vocabulary; unchanged if the tokenizer cannot be opened."""
    if config.tokenizer.path is None:
        return config
    try:
        from ctxlm_ds.tokenizers.load import resolve

        return resolve(config)[0]
    except (ImportError, TokenizerError):
        return config


def deepspeed_settings(arguments: argparse.Namespace, config: RunConfig, world_size: int) -> dict[str, Any]:
    """Return DeepSpeed's settings with the values of the recipe."""
    source = str(arguments.deepspeed_config or config.deepspeed or DEFAULT_CONFIG)
    return build_deepspeed_config(config, load_deepspeed_json(source), world_size, source=f"DeepSpeed config {source}")
