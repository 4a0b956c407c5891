"""Verify a run for GPUs that are not here: what is proved, what is checked, and what only a device can show.

It needs no GPU and takes at most two minutes on a login node; exit status 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ctxlm_ds.apps.verify import parts
from ctxlm_ds.apps.verify.device_guard import load_device_guard
from ctxlm_ds.apps.verify.parts import CHECKED, NOT_CHECKED, ONLY_A_DEVICE, WRONG, Finding, as_dict, table
from ctxlm_ds.console import at_least
from ctxlm_ds.errors import ConfigError, VerifyError

if TYPE_CHECKING:
    from ctxlm_ds.recipe.phases import RunPhase

CAPABILITIES = {"V100": (7, 0), "A100": (8, 0), "H100": (9, 0), "H200": (9, 0)}
"""Beginning of a GPU's name -> its compute capability."""


def main() -> None:
    """Print the findings, on a terminal each part as soon as it is done; exit with status 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("config", metavar="RECIPE", help="recipe: a path, or a shipped one's name")
    add("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="change its settings")
    add("--gpus", type=at_least(1), required=True, metavar="N", help="number of GPUs")
    add("--gpus-per-node", type=at_least(1), default=8, metavar="M", help="GPUs of each node (8)")
    add("--gpu", required=True, metavar="V100-32|A100-40|A100-80|H100|H200|FILE", help="or a YAML file of another GPU")
    add("--capability", metavar="X.Y", help="compute capability of the GPU of a YAML file")
    add("--deepspeed_config", "--deepspeed-config", metavar="JSON", help="DeepSpeed JSON: a path or a shipped name")
    add("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    findings = []
    for finding in verify(args):
        findings.append(finding)
        if sys.stderr.isatty():
            print(f"{finding.part}: {finding.state}", file=sys.stderr)
    columns = shutil.get_terminal_size((100, 24)).columns
    print(json.dumps(as_dict(findings), indent=2) if args.json else "\n".join(table(findings, columns)))
    sys.exit(any(finding.state == WRONG for finding in findings))


def verify(args: argparse.Namespace) -> Iterator[Finding]:
    """Yield the findings, phase by phase. Raises ConfigError if the recipe is refused for this number of GPUs."""
    from ctxlm_ds.recipe.load import load_config
    from ctxlm_ds.recipe.phases import run_phases

    phases, why_not = run_phases(load_config(args.config, args.set, args.gpus), args.gpus), ""
    try:
        load_device_guard()  # before torch, which the first phase imports
    except VerifyError as error:
        why_not = str(error)
    for phase in phases:
        for found in verify_phase(args, phase, why_not):
            yield found if phase.count == 1 else replace(found, part=f"{phase.describe()}: {found.part}")
            if found.part == "precision":
                return
    yield Finding("on a device", ONLY_A_DEVICE, "speed, NCCL, streams and CUDA graphs, rounding of tensor cores")


def verify_phase(args: argparse.Namespace, phase: RunPhase, why_not: str) -> Iterator[Finding]:
    """Yield the findings of a phase, the fastest first; `why_not` says why its model cannot be run here, or nothing."""
    from ctxlm_ds.apps.plan.check_run import deepspeed_settings, input_lines, layout_of, run_lines, with_tokenizer_size
    from ctxlm_ds.apps.plan.plan import Planner
    from ctxlm_ds.export.teacher import with_teacher
    from ctxlm_ds.recipe.deepspeed import DEFAULT_CONFIG
    from ctxlm_ds.recipe.hardware import Cluster, find_gpu
    from ctxlm_ds.recipe.json_source import load_deepspeed_json
    from ctxlm_ds.recipe.zero import ZeroSettings
    from ctxlm_ds.registry import FAMILIES

    gpu, each = find_gpu(args.gpu), min(args.gpus_per_node, args.gpus)
    if args.gpus % each:
        raise ConfigError(f"--gpus {args.gpus}: not a multiple of --gpus-per-node {each}")
    config = phase.config
    if config.teacher.path is not None:
        config = with_teacher(config)
    settings = deepspeed_settings(args, config, args.gpus)
    zero = ZeroSettings.of_json(settings).stage
    layout = layout_of(config.parallel, config.training, zero, args.gpus)
    lines = run_lines(config.name, config.training, config.data.seq_length, layout, config.directory)[:-1]
    yield Finding("recipe", CHECKED, "\n".join(map(str.strip, lines)))
    yield parts.inputs(partial(input_lines, config))
    config = with_tokenizer_size(config)
    if config.model.vocab_size is None:
        size = FAMILIES.get(config.model.family).vocab_size
        if size is None:
            raise ConfigError("model.vocab_size is unknown until the tokenizer exists; add --set model.vocab_size=N")
        config = config.with_values("model", vocab_size=size)
    if config.training.precision == "bf16" and not gpu.has_bf16:
        yield Finding("precision", WRONG, f"{gpu.name} has no bf16; add --set training.precision=fp16")
        return
    planner = Planner(config, Cluster(gpu, args.gpus // each, each), {zero: settings})
    yield parts.memory(planner, layout)
    capability = capability_of(gpu.name, args.capability)
    source = str(args.deepspeed_config or config.deepspeed or DEFAULT_CONFIG)
    given = {"recipe": config.model_dump(mode="json"), "deepspeed": load_deepspeed_json(source), "num_ranks": args.gpus}
    with ThreadPoolExecutor() as apart:
        counted = apart.submit(parts.run_apart, "ranks", given)
        if why_not:
            yield Finding("model", NOT_CHECKED, why_not)
        else:
            yield from parts.model(planner, layout, capability, apart)
        yield parts.ranks(counted, args.gpus)


def capability_of(name: str, asked: str | None) -> tuple[int, int]:
    """Return the compute capability that is asked for, or that of a known GPU."""
    if asked is not None:
        major, dot, minor = asked.partition(".")
        if not (major.isdecimal() and dot and minor.isdecimal()):
            raise ConfigError(f"--capability {asked}: expected two numbers, such as 9.0")
        return int(major), int(minor)
    found = next((value for beginning, value in CAPABILITIES.items() if name.startswith(beginning)), None)
    if found is None:
        raise ConfigError(f"--gpu {name}: its compute capability is unknown; add --capability 8.9, for example")
    return found
