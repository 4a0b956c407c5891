"""The check of a recipe and of what its run reads, `ctxlm_ds.pretrain --check`; its last lines alone need torch."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ctxlm_ds.apps.plan.layouts import Layout
from ctxlm_ds.checkpoint.saved_state import read_progress
from ctxlm_ds.console import at_least, counted, logger, program
from ctxlm_ds.errors import ConfigError, CtxlmError, KernelError, TokenizerError
from ctxlm_ds.installed import NEEDED
from ctxlm_ds.process.cgroups import available_cores, available_memory
from ctxlm_ds.recipe.check import schedule_warnings
from ctxlm_ds.recipe.choices import MODEL
from ctxlm_ds.recipe.deepspeed import DEFAULT_CONFIG, build_deepspeed_config
from ctxlm_ds.recipe.hardware import GIB, GPUS, Cluster
from ctxlm_ds.recipe.json_source import load_deepspeed_json
from ctxlm_ds.recipe.load import dump_config, load_config
from ctxlm_ds.recipe.phases import RunPhase, run_phases
from ctxlm_ds.recipe.schema import KernelsConfig, ParallelConfig, RunConfig, TrainingConfig
from ctxlm_ds.recipe.sections import DataSection, RowSettings
from ctxlm_ds.recipe.source_rules import needs_teacher
from ctxlm_ds.recipe.words import STEPS_FOLLOW
from ctxlm_ds.recipe.zero import ZeroSettings
from ctxlm_ds.training.hooks.trackers import check_hooks, look_for_hook

if TYPE_CHECKING:
    from ctxlm_ds.data.index.build import IndexPlace

MODULE = "ctxlm_ds.pretrain"


class _Parser(argparse.ArgumentParser):  # other programs have settings as options
    def error(self, message: str) -> NoReturn:
        advice = "a setting is --set model.num_layers=24; arguments of other scripts: ctxlm init --from-megatron"
        super().error(f"{message}; {advice} or --from-run-mlm" if message.startswith("unrecognized") else message)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; arguments that launchers add (--local_rank) are ignored."""
    parser = _Parser(prog=program(MODULE), description="Pretrain from a recipe.", allow_abbrev=False)
    parser.add_argument("--config", metavar="RECIPE", help="recipe: a path or the name of a shipped one")
    parser.add_argument("--list", action="store_true", help="list the shipped recipes")
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
    arguments = parser.parse_args(argv)
    if arguments.config is None and not arguments.list:
        parser.error("--config RECIPE is missing; --list has the shipped recipes")
    return arguments


def check_only(arguments: argparse.Namespace) -> None:
    """Check a recipe for a planned number of ranks; only what is known of the model's memory needs torch."""
    world_size = arguments.world_size or arguments.ranks
    config = load_config(arguments.config, arguments.set, world_size)
    if needs_teacher(config.objective) and config.teacher.path is not None:
        from ctxlm_ds.export.teacher import with_teacher

        config = with_teacher(config)
    check_hooks(config.logging, look_for_hook)
    phases = run_phases(config, world_size)
    settings = [deepspeed_settings(arguments, phase.config, world_size) for phase in phases]
    if arguments.print:
        sys.stdout.write(dump_config(config))
        return
    progress = read_progress(config.directory, with_tokenizer_size(config))
    described = [phase_lines(arguments, *phase, world_size) for phase in zip(phases, settings, strict=True)]
    lines = [line for each in described for line in each]
    lines += [] if progress is None else [f"  {progress.describe()}"]
    sys.stdout.writelines(f"{line}\n" for line in lines)


def phase_lines(
    arguments: argparse.Namespace, phase: RunPhase, deepspeed: dict[str, Any], world_size: int
) -> list[str]:
    """Check what a phase of a run reads; return its batch, layout, length, inputs and memory."""
    config = with_tokenizer_size(phase.config)
    for line in schedule_warnings(config.schedule, config.training.max_steps):
        logger.warning("%s", line)
    inputs = input_lines(config)
    changes = ["--set", *arguments.set] if arguments.set else []
    plan = f"ctxlm plan {shlex.join(['--config', arguments.config, *changes])}"
    for_gpus = getattr(arguments, "gpus_per_node", None) is not None  # of `ctxlm submit`, for other machines
    model = lines_or_reason(partial(planned_model, config, deepspeed, world_size, plan, for_gpus))
    layout = layout_of(config.parallel, config.training, ZeroSettings.of_json(deepspeed).stage, world_size)
    name = config.name if phase.count == 1 else f"{config.name}, {phase.describe()}"
    lines = run_lines(name, config.training, config.data.seq_length, layout, config.directory)
    if phase.number:
        rows = "continue" if phase.continues else "start again"
        lines.insert(1, f"  begins with the weights of the phase before, moments: {phase.phase.moments}; rows {rows}")
    return lines + inputs + model


def input_lines(config: RunConfig, must_exist: bool = False) -> list[str]:
    """Return how many documents a run reads, or which inputs are not here yet.

    Raises ConfigError with everything that the run would refuse; what is not here counts if it `must_exist`.
    """
    data = config.data
    named = [("tokenizer.path", config.tokenizer.path), *([] if data.train else [("data.train", None)])]
    named += [("data.train", f"{source.path}.idx") for source in data.train]
    named += [("data.validation", f"{source.path}.idx") for source in data.validation]
    folders = ("initialize_from", config.initialize_from), ("teacher.path", config.teacher.path)
    named += [(setting, path) for setting, path in folders if path is not None]
    missing = {f"{name} {path or '(not set)'}": name for name, path in named if not path or not Path(path).exists()}
    lines = [f"  not found from {Path.cwd()}: {', '.join(missing)}"] if missing else []
    if not must_exist and {"tokenizer.path", "data.train", "data.validation"} & set(missing.values()):
        return [*lines, "  tokenizer and data: not checked, for they are not all here"]
    try:
        places = list(index_places(config.row_settings, config.tokenizer.path, config.model.vocab_size))
    except ImportError as error:
        return [*lines, f"  tokenizer and data: not checked, {error.name} is not installed here"]
    problems = dict.fromkeys(str(place) for place in places if isinstance(place, CtxlmError))
    if must_exist and "initialize_from" in missing.values():
        problems[f"initialize_from: {config.initialize_from} is not a folder"] = None
    if problems:
        raise ConfigError("\n  ".join([f"{config.name}: the run would end at its beginning", *problems]))
    built = [place for place in places if not isinstance(place, CtxlmError)]
    counts = [place.documents[1] - place.documents[0] for place in built]
    train, held_out = sum(counts[: len(data.train)]), sum(counts[len(data.train) :])
    lines.append(f"  tokenizer and data: found, {counted(train, 'document')} to train on, {held_out:,} held out")
    return [*lines, *_word_lines(data, config.training.max_words, built[: len(data.train)])]


def _word_lines(data: DataSection, budget: int | None, places: Sequence[IndexPlace]) -> list[str]:
    """Return how many words a run may read and how often it reads them, if its budget is in words.

    Raises ConfigError if that is more often than data.max_epochs. Shares by weight are known at the start of the run.
    """
    from ctxlm_ds.data.stream.run_plan import refuse_epochs, words_of

    sources = data.train
    counts = [words_of(place.dataset, place.documents) for place in places]
    words = [count * (source.epochs or 1.0) for count, source in zip(counts, sources, strict=True) if count is not None]
    if budget is None or data.blend != "concatenate" or len(words) < len(sources):
        return []
    epochs = budget / max(1.0, sum(words))
    for source in sources:
        refuse_epochs(data, source.path, epochs * (source.epochs or 1.0))
    return [f"  words: {sum(words):,.0f} an epoch, {epochs:.2f} epochs"]


def index_places(
    rows: RowSettings, tokenizer_path: str | None, vocab_size: int | None
) -> Iterator[IndexPlace | CtxlmError]:
    """Yield the place of the sample index of each part of a dataset that a run reads, or what is wrong with it."""
    from ctxlm_ds.data.index.build import FEWEST_DOCUMENTS, IndexPlace
    from ctxlm_ds.data.stream.run_datasets import held_out_parts, train_parts
    from ctxlm_ds.objectives.base import build_objective
    from ctxlm_ds.tokenizers.load import open_tokenizer

    try:
        tokenizer, _ = open_tokenizer(tokenizer_path, vocab_size)
        build_objective(rows.objective, tokenizer)
        train, held_out = train_parts(rows.data, copies=False), held_out_parts(rows.data, copies=False)
    except CtxlmError as error:
        yield error
        return
    for part, is_held_out in [*((part, False) for part in train), *((part, True) for part in held_out.values())]:
        try:
            place = IndexPlace.of(part, tokenizer, rows, is_held_out)
            first, after = place.documents
            few = replace(place, documents=(first, min(after, first + FEWEST_DOCUMENTS)))
            next(few.make(tokenizer).pieces, None)
            yield place
        except CtxlmError as error:
            yield error


def with_tokenizer_size(config: RunConfig) -> RunConfig:
    """Return the recipe with the size of its tokenizer's vocabulary; unchanged if the tokenizer cannot be opened."""
    if config.tokenizer.path is None:
        return config
    try:
        from ctxlm_ds.tokenizers.load import open_tokenizer

        _, size = open_tokenizer(config.tokenizer.path, config.model.vocab_size)
        return config.with_values("model", vocab_size=size)
    except (ImportError, TokenizerError):
        return config


def deepspeed_settings(arguments: argparse.Namespace, config: RunConfig, world_size: int) -> dict[str, Any]:
    """Return DeepSpeed's settings with the values of the recipe."""
    source = str(arguments.deepspeed_config or config.deepspeed or DEFAULT_CONFIG)
    return build_deepspeed_config(config, load_deepspeed_json(source), world_size, source=f"DeepSpeed config {source}")


ASSUMED_WORDS = 32_768
"""Vocabulary of a family that was published without one, until the tokenizer is here."""
PROGRAM_BYTES = 0.7 * GIB
"""Memory that Python and its libraries take in a rank on a CPU (measured: 0.6 GiB)."""
ACCELERATOR_VARIABLE = "DS_ACCELERATOR"
"""Set by a user: the kind of device that DeepSpeed takes."""


def layout_of(parallel: ParallelConfig, training: TrainingConfig, zero_stage: int, world_size: int) -> Layout:
    """Return the layout that a recipe has on a number of ranks."""
    return Layout(
        data=parallel.data_parallel_size(world_size),
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        zero_stage=zero_stage,
        micro_batch_size=training.micro_batch_size,
        recompute=training.activation_checkpointing,
        sequence_parallel=parallel.sequence_parallel,
        context=parallel.context_parallel_size,
    )


def run_lines(name: str, training: TrainingConfig, length: int, layout: Layout, run_dir: Path) -> list[str]:
    """Return batch, layout, steps and run directory of a checked recipe; tokens are positions, padding included."""
    rows, micro_batches = training.global_batch_size, layout.num_micro_batches(training.global_batch_size)
    ramp = f", from {training.batch_size_at(0):,} rows (batch_ramp)" if training.batch_ramp else ""
    context = f" x context {layout.context}" if layout.context > 1 else ""
    split = f"data {layout.data}{context} x tensor {layout.tensor} x pipeline {layout.pipeline}"
    switches = {"sequence parallel": layout.sequence_parallel, "recomputation": layout.recompute}
    extras = [switch for switch, on in switches.items() if on]
    steps = f"{training.max_steps:,}, {training.rows_after(training.max_steps) * length:,} tokens in all"
    if training.max_steps == STEPS_FOLLOW:
        words = training.max_words
        steps = "as many as its hours allow" if words is None else f"as many as read {words:,} words"
    limits = [
        *([f"at most {training.max_tokens:,} tokens"] if training.max_tokens is not None else []),
        *([f"at most {training.max_hours:g} hours"] if training.max_hours is not None else []),
    ]
    return [
        f"{name}: the recipe is valid for {counted(layout.world_size, 'rank')}",
        f"  batch: {training.micro_batch_size} (micro) x {micro_batches} (accumulation) x {layout.data} (data ranks) = "
        f"{counted(rows, 'row')} = {rows * length:,} tokens{ramp}",
        f"  layout: {', '.join([split, *extras])}; ZeRO stage {layout.zero_stage}; {training.precision}",
        f"  steps: {steps}{''.join(f', {limit}' for limit in limits)}",
        f"  run directory: {run_dir}",
    ]


def lines_or_reason(plan: Callable[[], list[str]]) -> list[str]:
    """Return the lines of a plan, or why they are unknown here; ConfigError if the model is impossible."""
    missing = next((name for name in NEEDED if importlib.util.find_spec(name) is None), None)
    if missing is not None:
        return [f"  parameters and memory: unknown, {missing} is not installed here"]
    try:
        return plan()
    except (KernelError, ImportError, OSError) as error:
        return [f"  parameters and memory: unknown, {error}"]


def planned_model(
    config: RunConfig,
    deepspeed: Mapping[str, Any],
    world_size: int,
    plan_command: str = "ctxlm plan",
    for_gpus: bool = False,
) -> list[str]:
    """Plan the layout of the recipe; return parameters and memory of a rank. Imports torch.

    `plan_command` plans the recipe for GPUs; `for_gpus`: the run will have GPUs that this machine may lack.
    """
    from ctxlm_ds.apps.plan.plan import Planner
    from ctxlm_ds.models.meter import CPU, CUDA
    from ctxlm_ds.parallel.parameters import fix_others

    assumed, size = "", MODEL.registry.get(config.model.family).vocab_size or ASSUMED_WORDS
    if config.model.vocab_size is None:
        config = config.with_values("model", vocab_size=size)
        assumed = f" (with a vocabulary of {size:,}; the run takes the tokenizer's)"
    gpu = for_gpus or has_gpu()
    why_not = None if gpu else why_not_on_cpu(config.training, config.kernels, world_size)
    kind = deepspeed["optimizer"]["type"] if config.optimizer.handed_over else ""
    if not gpu and kind.lower() == "lion" and not ZeroSettings.of_json(deepspeed).offload_optimizer:
        why_not = "DeepSpeed's Lion needs one, or offload_optimizer"
    on_cpu = not gpu and why_not is None
    settings = dict(deepspeed)
    if on_cpu:  # what is offloaded is in the same memory
        zero = deepspeed.get("zero_optimization") or {}
        settings["zero_optimization"] = {k: v for k, v in zero.items() if not k.startswith("offload_")}
    stage = ZeroSettings.of_json(settings).stage
    planner = Planner(config, Cluster(GPUS[0], 1, 1), {stage: settings}, CPU if on_cpu else CUDA)
    fix_others(planner.model.facts, config.training.only)
    memory = planner.memory(layout_of(config.parallel, config.training, stage, world_size))
    parts = ", ".join(f"{name} {part / GIB:.2f}" for name, part in asdict(memory).items())
    planned_for = "planned for a GPU" if why_not is None else f"planned for a GPU (none is here, and {why_not})"
    if on_cpu:
        planned_for = f"planned for the CPU of this machine in {config.training.precision}"
    lines = [
        f"  parameters: {planner.model.num_parameters:,}{assumed}",
        f"  memory of a rank, {planned_for}: {memory.total / GIB:.2f} GiB ({parts})",
    ]
    if on_cpu:
        together, free = world_size * (memory.total + PROGRAM_BYTES), available_memory()
        ranks = f"with Python and libraries {counted(world_size, 'rank')} take{'s' if world_size == 1 else ''}"
        line = f"  {ranks} about {together / GIB:.1f} GiB; this machine has {free / GIB:.1f} GiB free"
        line += ", which is too little: lower training.micro_batch_size" if together > free else ""
        lines += [line, f"  no GPU is here; to plan for GPUs: {plan_command} --gpu TYPE (A100-80, H100, ...)"]
    return lines


def has_gpu() -> bool:
    """Return whether a run on this machine would train on a GPU. Imports torch."""
    import torch

    return os.environ.get(ACCELERATOR_VARIABLE, "cuda") != "cpu" and torch.cuda.is_available()


def why_not_on_cpu(training: TrainingConfig, kernels: KernelsConfig, world_size: int) -> str | None:
    """Return why a recipe is not for the CPU cores of this machine, or None. Imports torch."""
    from ctxlm_ds.kernels.attention_spec import AttentionSpec
    from ctxlm_ds.kernels.dispatch import DTYPES, OPERATIONS, table_of
    from ctxlm_ds.kernels.implementation import Need

    cores = available_cores()
    if world_size > cores:
        return f"{world_size:,} ranks are more than its {counted(cores, 'core')}"
    if training.precision == "fp16":
        return "training.precision is fp16"
    if training.compile and training.compile_mode != "default":
        return f"training.compile_mode is {training.compile_mode}"
    need = Need(AttentionSpec(head_size=64), "cpu", DTYPES[training.precision])
    for operation in OPERATIONS:
        asked = getattr(kernels, operation)
        if any(row.name == asked and row.why_not(need) is not None for row in table_of(operation, asked)):
            return f"kernels.{operation} is {asked}"
    return None
