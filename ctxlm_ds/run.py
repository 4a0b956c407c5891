"""Builder of a run: tokenizer, rows, model, engine, checkpoints and hooks of a checked recipe become a trainer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ctxlm_ds import atomic
from ctxlm_ds.checkpoint.fixed_settings import refuse_changed_settings
from ctxlm_ds.checkpoint.manager import CheckpointManager
from ctxlm_ds.checkpoint.training import TrainingCheckpoints
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.held_out import tokens_per_word
from ctxlm_ds.data.stream.loader import EvalLoader, TrainLoader
from ctxlm_ds.data.stream.plan_table import plan_lines
from ctxlm_ds.data.stream.preview import BatchRows
from ctxlm_ds.data.stream.run_datasets import RunRows, build_run_rows
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.export.initial_weights import load_initial_moments, load_initial_weights, warn_of_other_tokens
from ctxlm_ds.export.stored_loader import StoredEvalLoader, StoredTrainLoader, open_rows
from ctxlm_ds.export.stored_outputs import TRAIN
from ctxlm_ds.export.stored_rows import StoredRows
from ctxlm_ds.export.teacher import teacher_values, with_checked_teacher
from ctxlm_ds.kernels.dispatch import DTYPES, KernelSet
from ctxlm_ds.models.build import ModelBuild, build_run_layers
from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.parts.decoder_loss import with_decoder_losses
from ctxlm_ds.objectives.base import Objective
from ctxlm_ds.objectives.build import build_objective
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.process.launch import StopSignal
from ctxlm_ds.process.run_history import SAVE_FAILED, append_event
from ctxlm_ds.process.run_lock import RunLock
from ctxlm_ds.recipe.load import dump_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import FAMILIES, load_object
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import resolve
from ctxlm_ds.tokenizers.report import log_unused_rows
from ctxlm_ds.tokenizers.word_counts import word_counts
from ctxlm_ds.training.continuations import build_continuations, encode_prompts
from ctxlm_ds.training.engine.engine import Engine
from ctxlm_ds.training.engine.runtime import compile_setting, device_type, explain_out_of_memory
from ctxlm_ds.training.hooks.hook_setup import check_hooks
from ctxlm_ds.training.hooks.hooks import Hooks, build_hooks
from ctxlm_ds.training.loop.recovery import Recovery
from ctxlm_ds.training.loop.saves import Saves
from ctxlm_ds.training.loop.state import TrainState
from ctxlm_ds.training.loop.trainer import Trainer
from ctxlm_ds.training.schedules.schedule import LearningRateSchedule

logger = logging.getLogger("ctxlm_ds")


def build_run(
    config: RunConfig, deepspeed_config: dict[str, Any], lock: RunLock, topology: Topology, stop_signal: StopSignal
) -> Trainer:
    """Build the trainer of a run and resume it if the run directory has a checkpoint.

    Raises:
        ConfigError, DataError, TokenizerError, CheckpointError: a mistake of the user, on every rank.
    """
    run_dir = lock.run_dir
    config, tokenizer = resolve_on_every_rank(config, topology)
    if topology.is_main:
        log_unused_rows(config.model.vocab_size or 0, tokenizer.output_size)
    objective = build_objective(config.objective, tokenizer)
    prompts = encode_prompts(config, objective, tokenizer)
    manager = CheckpointManager(run_dir, config.checkpoint, topology, lock)
    newest = find_start(config, tokenizer, manager, topology)
    logger.info("reading the data")
    rows = build_rows_by_node(config, tokenizer, objective, topology)
    data = agreed_data(rows.describe(config.data.train, tokenizer), topology)
    engine = build_engine(config, deepspeed_config, objective, topology)
    checkpoints = TrainingCheckpoints(manager, engine, config, run_dir / "tokenizer", data)

    def load(folder: Path | None) -> TrainState:
        state = checkpoints.resume(folder)
        if state is None:
            engine.forget_updates()
            initialize_weights(config, engine)
        return state or TrainState()

    def load_last_good() -> TrainState:
        good = load(manager.find_resumable())
        # Later checkpoints belong to the abandoned steps; no restart may resume from them.
        manager.remove_after(good.step)
        return good

    def record_failure(step: int, reason: str) -> bool:
        return not topology.is_main or append_event(run_dir, SAVE_FAILED, step=step, why=reason)

    state = load(newest)
    for line in plan_lines(
        config.data, config.training, config.evaluation, rows.train, rows.validation, state.step, state.rows_consumed
    ):
        logger.info("%s", line)
    topology.run_on_rank_0(lambda: write_run_folder(config, tokenizer, run_dir, state.step))
    last_row = config.training.rows_after(config.training.max_steps - state.step, state.rows_consumed)
    stored = topology.run_together(lambda: open_rows(config, rows, tokenizer, engine.module.inputs, last_row))
    steps, validation = build_loaders(
        config, rows, objective, topology, state.rows_consumed, stored, engine.device
    )
    return Trainer(
        config=config,
        engine=engine,
        schedule=LearningRateSchedule(config.schedule, config.optimizer.learning_rate, config.training.max_steps),
        steps=steps,
        validation=validation,
        saves=Saves(config.checkpoint, checkpoints, record_failure),
        recovery=Recovery(
            config.anomalies,
            run_dir,
            BatchRows(rows.train, config.data, config.training) if topology.is_main else None,
            load_last_good=load_last_good,
            steps_from=steps.restart,
        ),
        hooks=build_all_hooks(config, run_dir, topology, stop_signal),
        topology=topology,
        stop_signal=stop_signal,
        state=state,
        changed_settings=checkpoints.changed_settings,
        tokens_per_word=topology.compute_on_rank_0(lambda: held_out_words(config, rows, objective, tokenizer)),
        continuations=build_continuations(config, prompts, rows, objective, tokenizer, topology),
    )


def resolve_on_every_rank(config: RunConfig, topology: Topology) -> tuple[RunConfig, Tokenizer]:
    """Return the resolved recipe with its teacher, and its tokenizer, after checking the tasks that judge it.

    Raises:
        ConfigError, DataError, TokenizerError: a mistake of the user, on every rank.
    """
    config, tokenizer = topology.run_on_rank_0_first(partial(resolve, config))
    config = agreed_teacher(config, tokenizer, topology)
    topology.run_on_rank_0_first(partial(check_downstream, config, builds_hooks=topology.is_main))
    return config, tokenizer


def find_start(
    config: RunConfig, tokenizer: Tokenizer, manager: CheckpointManager, topology: Topology
) -> Path | None:
    """Return the checkpoint to resume from, None for a fresh run, before the sample indexes are built (takes long).

    Raises:
        ConfigError, CheckpointError: the checkpoint is of other settings, or a fresh run lacks its source of weights.
    """
    manager.check_shared()
    manager.clean_leftovers()
    newest = manager.find_resumable()
    if newest is not None:
        topology.run_on_rank_0_first(lambda: refuse_changed_settings(newest, config))
    elif config.initialize_from is None:
        refuse_missing_source(config)
    elif topology.is_main:
        warn_of_other_tokens(config.initialize_from, tokenizer)
    return newest


def check_downstream(config: RunConfig, builds_hooks: bool = False) -> None:
    """Refuse tasks of evaluation.downstream that lack something or that the family cannot do, and hooks likewise."""
    if builds_hooks:
        check_hooks(config)
    if config.evaluation.downstream:
        load_object("ctxlm_ds.apps.downstream.during_run:check_tasks")(config)


def build_all_hooks(config: RunConfig, run_dir: Path, topology: Topology, stop_signal: StopSignal) -> Hooks:
    """Return the hooks of this rank; the one that judges checkpoints on tasks is on rank 0."""
    hooks = Hooks(build_hooks(config, run_dir, topology, stop_signal))
    if config.evaluation.downstream and topology.is_main:
        judge = load_object("ctxlm_ds.apps.downstream.during_run:DownstreamHook")
        hooks.prepend(judge(config, run_dir, hooks.call, lambda: bool(stop_signal.number)))
    return hooks


def held_out_words(
    config: RunConfig, rows: RunRows, objective: Objective, tokenizer: Tokenizer
) -> dict[str, float]:
    """Return the tokens per word of the held-out sources of a causal model, if its tokens keep the text's spaces."""
    term = next((term for term in objective.terms if term.has_perplexity), None)
    counts = None if term is None or objective.next_tokens is None else word_counts(tokenizer)
    if term is None or counts is None:
        return {}
    loaders = {
        name: EvalLoader(source, objective, config.data, config.training, config.evaluation)
        for name, source in rows.validation.items()
    }
    found = {name: tokens_per_word(loader, term, counts) for name, loader in loaders.items()}
    return {name: number for name, number in found.items() if number is not None}


def refuse_missing_source(config: RunConfig) -> None:
    """Raise ConfigError if settings need initialize_from, which is not set."""
    if config.initialize_moments:
        raise ConfigError(
            "initialize_moments is true, but initialize_from is not set: name the run of the first phase, e.g. "
            "--set initialize_from=runs/phase1, or set initialize_moments=false"
        )
    if config.initialize_layers is not None:
        raise ConfigError(
            f"initialize_layers is {config.initialize_layers}, but initialize_from is not set: name the model whose "
            "layers initialize this one, e.g. the teacher, or set initialize_layers=null for random weights"
        )


def build_rows_by_node(config: RunConfig, tokenizer: Tokenizer, objective: Objective, topology: Topology) -> RunRows:
    """Build or open the rows of the run on every rank.

    The first rank of each node builds missing sample indexes or waits for another node, then the others open them. This
    works with local and shared disks. Rank 0 also compares the checksums of existing indexes, unless they are as they
    were when they were last compared.

    Raises:
        ConfigError, DataError: build_run_rows failed on any rank; raised on every rank.
    """

    def build() -> RunRows:
        return build_run_rows(config.row_settings, tokenizer, objective, verify=topology.is_main, trust=True)

    rows = topology.run_together(lambda: build() if topology.local_rank == 0 else None)
    return topology.run_together(lambda: build() if rows is None else rows)


def agreed_data(own: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Return the description of the data after checking that every rank has the same.

    Raises:
        DataError: a rank has other data; raised on every rank.
    """
    first = topology.broadcast_object(own)
    for rank, description in topology.gather_some(None if own == first else own).items():
        raise DataError(
            f"rank {rank} reads other data than rank 0 ({description} instead of {first}); copy the same "
            "datasets to every node and check them with ctxlm inspect --verify"
        )
    return own


def agreed_teacher(config: RunConfig, tokenizer: Tokenizer, topology: Topology) -> RunConfig:
    """Return the recipe with the teacher's settings and fingerprint, which are the same on every rank.

    Raises:
        ConfigError: the teacher does not fit, or a rank has another one; raised on every rank.
    """
    config = topology.run_on_rank_0_first(lambda: with_checked_teacher(config, tokenizer))
    own, first = config.teacher.fingerprint, topology.broadcast_object(config.teacher.fingerprint)
    for rank in topology.gather_some(None if own == first else str(own)):
        raise ConfigError(
            f"teacher.path: {config.teacher.path} holds other files on rank {rank} than on rank 0; copy the same "
            "folder to every node"
        )
    return config


def build_loaders(
    config: RunConfig,
    rows: RunRows,
    objective: Objective,
    topology: Topology,
    start_row: int,
    stored: Mapping[str, StoredRows],
    device: torch.device | None = None,
) -> tuple[TrainLoader, Mapping[str, Iterable[Batch | None]]]:
    """Return the training steps and the held-out batches; inner pipeline stages get no data.

    Args:
        config: the recipe.
        rows: of the run.
        objective: makes the batches.
        topology: the ranks.
        start_row: first row of the training steps.
        stored: a teacher's outputs by part (export/stored_loader.py), empty if there are none.
        device: where the batches are used; None for the CPU.
    """
    idle = 0 < topology.pipeline_parallel_rank < topology.pipeline_parallel_size - 1
    ranks = topology.data_parallel_rank, topology.data_parallel_size

    def held_out(name: str, source: RowSource) -> EvalLoader:
        if stored:
            return StoredEvalLoader(
                stored[f"eval/{name}"],
                source,
                objective,
                config.data,
                config.training,
                config.evaluation,
                ranks,
                device,
            )
        return EvalLoader(source, objective, config.data, config.training, config.evaluation, ranks, device)

    loaders = {name: held_out(name, source) for name, source in rows.validation.items()}
    validation = {name: [None] * len(loader) if idle else loader for name, loader in loaders.items()}
    arguments = (rows.train, objective, config.data, config.training, ranks, start_row, idle, device)
    return StoredTrainLoader(stored[TRAIN], *arguments) if stored else TrainLoader(*arguments), validation


def build_engine(
    config: RunConfig, deepspeed_config: dict[str, Any], objective: Objective, topology: Topology
) -> Engine:
    """Build the engine without setting the weights.

    Raises:
        ConfigError: the layout or the model is impossible, or does not fit in memory.
        KernelError: a kernel that the recipe names cannot run here.
    """
    def kernels_of(precision: str) -> KernelSet:
        return KernelSet(config.kernels, device_type(), DTYPES[precision])

    kernels = kernels_of(config.training.precision)
    stage = int(deepspeed_config.get("zero_optimization", {}).get("stage", 0))
    compiled = compile_setting(config.training, config.parallel, stage, device_type())

    def list_layers(parallel: ParallelContext) -> list[LayerDescription]:
        build = ModelBuild(
            (*objective.outputs, *objective.taps),
            kernels,
            parallel,
            recompute=config.training.activation_checkpointing,
            compile=compiled,
            shares_rows=config.data.shares_rows,
        )
        layers = build_run_layers(config, build, objective.teacher_outputs, kernels_of, objective.comparisons)
        labels = objective.word_labels
        if config.evaluation.continues:  # tokens are chosen from the logits
            labels = labels | {str(objective.written_tokens): None}
        return with_decoder_losses(layers, labels, kernels, config.kernels.cross_entropy)

    with explain_out_of_memory(config):
        engine = Engine(config, deepspeed_config, list_layers, objective, topology)
    layers = f", layers compiled ({config.training.compile_mode})" if compiled else ""
    logger.info("kernels: %s, %s%s", kernels.describe(), engine.optimizer_choice, layers)
    family, whole = FAMILIES.get(config.model.family), engine.whole_model
    fresh = partial(whole.initial_value, seed=config.training.seed)
    frozen = load_object(family.frozen)(config.model) if family.frozen else fresh
    engine.load_frozen(teacher_values(config) if objective.teacher_outputs else frozen)
    return engine


def initialize_weights(config: RunConfig, engine: Engine) -> None:
    """Set the parameters to fresh values by (seed, name), or weights (and moments) to those of `initialize_from`."""
    fresh = partial(engine.whole_model.initial_value, seed=config.training.seed)
    held = {fragment.name for fragment in engine.fragments()}
    names = [name for name in engine.whole_model.trained_shapes if name in held]
    source = config.initialize_from
    if source is None:
        engine.load_weights((name, fresh(name)) for name in names)
        return
    on_every_rank = engine.topology.run_on_rank_0_first
    outputs, layers = engine.objective.outputs, config.initialize_layers
    values = on_every_rank(lambda: load_initial_weights(source, config.model, outputs, fresh, layers))
    moments: dict[str, Iterator[tuple[str, torch.Tensor]]] = {}
    if config.initialize_moments:
        moments = on_every_rank(lambda: load_initial_moments(source, config.optimizer.name, engine.whole_model))
    engine.load_weights(values)
    if moments:
        engine.prepare_optimizer_state(0, list(moments))
    for kind, named in moments.items():
        engine.load_weights(named, kind)
    logger.info("%s taken from %s", " and ".join(("weights", *moments)), source)


def write_run_folder(config: RunConfig, tokenizer: Tokenizer, run_dir: Path, step: int) -> None:
    """Write config.yaml (resolved) and tokenizer/; keep a config.yaml that differs as config-until-step-STEP.yaml."""
    path, kept, text = run_dir / "config.yaml", run_dir / f"config-until-step-{step:08d}.yaml", dump_config(config)
    if step and path.is_file() and path.read_text(encoding="utf-8") != text and not kept.exists():
        path.rename(kept)
    atomic.write_text(path, text)
    with atomic.output_folder(run_dir / "tokenizer") as folder:
        tokenizer.save(folder)
