"""Builder of a run: tokenizer, rows, model, engine, checkpoints and hooks of a checked recipe become a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ctxlm_ds import atomic
from ctxlm_ds.checkpoint.manager import CheckpointManager
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.checkpoint.saved_state import (
    phase_to_train,
    read_saved_state,
    refuse_changed_data,
    refuse_changed_settings,
    saved_state,
)
from ctxlm_ds.checkpoint.training import TrainingCheckpoints, load_carried
from ctxlm_ds.console import logger
from ctxlm_ds.data.stream.preview import BatchRows
from ctxlm_ds.data.stream.run_plan import plan_lines, with_word_budget
from ctxlm_ds.errors import CheckpointError, ConfigError
from ctxlm_ds.export.initial_weights import load_initial_moments, load_initial_weights, warn_of_other_tokens
from ctxlm_ds.export.teacher import teacher_values, with_teacher
from ctxlm_ds.kernels.dispatch import DTYPES, KernelSet
from ctxlm_ds.models.layers import ModelBuild
from ctxlm_ds.models.program import build_program
from ctxlm_ds.objectives.base import Objective, build_objective
from ctxlm_ds.parallel.parameters import fix_others
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.process.run_files import METRICS_NAME
from ctxlm_ds.process.run_history import SAVE_FAILED, append_event
from ctxlm_ds.process.run_lock import RunLock
from ctxlm_ds.process.signals import StopSignal
from ctxlm_ds.recipe.load import dump_config
from ctxlm_ds.recipe.phases import RunPhase, run_phases
from ctxlm_ds.recipe.schema import RunConfig, TeacherConfig
from ctxlm_ds.recipe.sections import EMA_KIND
from ctxlm_ds.recipe.words import STEPS_FOLLOW
from ctxlm_ds.recipe.zero import ZeroSettings
from ctxlm_ds.run_data import RunData, build_data, build_loaders, held_out_words
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import open_tokenizer
from ctxlm_ds.training.continuations import Writing, build_continuations
from ctxlm_ds.training.engine.engine import Engine
from ctxlm_ds.training.engine.runtime import compile_setting, device_type, explain_out_of_memory, parallel_context
from ctxlm_ds.training.hooks.hooks import PROFILE_DIR, Hook, Hooks, ProfilerHook, RunStart
from ctxlm_ds.training.hooks.metrics import MetricsWriter, peak_row_seconds
from ctxlm_ds.training.hooks.status import StatusHook
from ctxlm_ds.training.hooks.trackers import build_trackers, check_hooks, takes_config, user_hooks
from ctxlm_ds.training.loop.recovery import Recovery
from ctxlm_ds.training.loop.saves import Saves
from ctxlm_ds.training.loop.state import TrainState
from ctxlm_ds.training.loop.trainer import Trainer
from ctxlm_ds.training.measure import useful_flops_per_row
from ctxlm_ds.training.schedules.schedule import LearningRateSchedule


@dataclass(frozen=True)
class RunStates:
    """States of a run: the state of a checkpoint, or the state that the run begins with."""

    manager: CheckpointManager
    checkpoints: TrainingCheckpoints
    initialize: Callable[[Path | None], None]
    """Sets the initial weights, to fresh values or those of a folder."""
    phase: int
    """Number of the phase, from 0."""
    begin_phase: Callable[[Path], TrainState]
    """Begins the phase from the last checkpoint of the one before."""

    def load(self, folder: Path | None) -> TrainState:
        """Load a checkpoint, the beginning of the phase from the one before it, or the initial weights if none is."""
        self.checkpoints.engine.forget_updates()
        if folder is not None and saved_state(folder).phase < self.phase:
            begun = self.begin_phase(folder)
            self.checkpoints.read_on(folder, begun)
            return begun
        state = self.checkpoints.resume(folder)
        if state is None:
            self.initialize(self.checkpoints.beginning)
        return state or TrainState()

    def load_last_good(self) -> TrainState:
        """Load the newest intact checkpoint, or the initial weights."""
        good = self.load(self.manager.find_resumable())
        # Later checkpoints belong to the abandoned steps; no restart may resume from them.
        self.manager.remove_after(good.step)
        return good


def build_run(
    config: RunConfig, deepspeed_config: dict[str, Any], lock: RunLock, topology: Topology, stop_signal: StopSignal,
    phase: RunPhase | None = None,
) -> Trainer:  # fmt: skip
    """Build the trainer of a run, or of its `phase`, and resume it if the run directory has a checkpoint.

    Raises:
        ConfigError, DataError, TokenizerError, CheckpointError: a mistake of the user, on every rank.
    """
    recipe, phase = config, phase or run_phases(config)[0]
    config, tokenizer = resolve_on_every_rank(phase.config, topology)
    manager = CheckpointManager(lock.run_dir, config.checkpoint, topology, lock)
    newest = find_start(config, tokenizer, manager, topology, phase.number)
    # A mistake in the model ends the run before the sample indexes are built.
    build_engine = engine_builder(config, deepspeed_config, build_objective(config.objective, tokenizer), topology)
    data = build_data(config, tokenizer, topology)
    begun = saved_state(newest) if newest is not None else TrainState()
    begun = begun if begun.phase == phase.number else begun.begin_phase(phase.number, phase.continues)
    config, words = topology.run_together(partial(with_word_budget, config, data.rows.train, begun.first_row))
    engine = build_engine()
    resolved = {"model": recipe.model.model_copy(update={"vocab_size": config.model.vocab_size})}
    recipe = recipe.model_copy(update={**resolved, "teacher": config.teacher}) if recipe.phases else config
    text = dump_config(recipe)
    of_run = text if recipe.phases else None
    checkpoints = TrainingCheckpoints(manager, engine, config, lock.run_dir / "tokenizer", data.description, of_run)
    phases = run_phases(recipe) if recipe.phases else [phase]
    begin = partial(begin_phase, engine=engine, phases=phases, number=phase.number, data=data.description)
    states = RunStates(manager, checkpoints, partial(initialize_weights, engine), phase.number, begin)
    state = states.load(newest)
    topology.run_on_rank_0(lambda: write_run_folder(text, tokenizer, lock.run_dir, state.step))
    hooks = Hooks(build_hooks(config, lock.run_dir, topology, stop_signal))
    trainer = build_trainer(config, lock.run_dir, data, states, state, hooks, stop_signal, words)
    if recipe.phases and recipe.training.max_steps < STEPS_FOLLOW:
        trainer.start = replace(trainer.start, last_step=recipe.training.max_steps)
    trainer.is_last_phase, trainer.phase_hours = phase.is_last, phase.phase.hours
    return trainer


def build_trainer(
    config: RunConfig, run_dir: Path, data: RunData, states: RunStates, state: TrainState, hooks: Hooks,
    stop_signal: StopSignal, words_per_row: float = 0.0,
) -> Trainer:  # fmt: skip
    """Build loaders, saves and recovery around an engine that has the weights of `state`."""
    engine, rows = states.checkpoints.engine, data.rows
    topology, training = engine.topology, config.training
    sections = config.data, training, config.evaluation
    done, last_step = state.step - state.first_step, state.first_step + training.max_steps
    for line in plan_lines(*sections, rows.train, rows.validation, done, state.rows_consumed):
        logger.info("%s", line)
    steps, validation = build_loaders(*sections, rows, data.objective, topology, state.rows_consumed, engine.device)
    named_rows = BatchRows(rows.train, config.data, training) if topology.is_main else None
    return Trainer(
        start=RunStart(state.step, last_step, config, states.checkpoints.changed_settings, state.tokens),
        training=training,
        evaluation=config.evaluation,
        engine=engine,
        schedule=LearningRateSchedule(config.schedule, config.optimizer.learning_rate, training.max_steps),
        steps=steps,
        validation=validation,
        saves=Saves(config.checkpoint, states.checkpoints, partial(record_failure, run_dir, topology.is_main)),
        recovery=Recovery(config.anomalies, run_dir, named_rows, states.load_last_good, steps.restart),
        hooks=hooks,
        stop_signal=stop_signal,
        state=state,
        words_per_row=words_per_row,
        tokens_per_word=topology.compute_on_rank_0(lambda: held_out_words(*sections, data)),
        continuations=build_continuations(
            Writing(*sections, data.objective, data.tokenizer), data.prompts, rows, topology
        ),
    )


def record_failure(run_dir: Path, is_main: bool, step: int, reason: str) -> bool:
    """Append a failed save to the history on rank 0; return False if that failed too."""
    return not is_main or append_event(run_dir, SAVE_FAILED, step=step, why=reason)


def resolve_on_every_rank(config: RunConfig, topology: Topology) -> tuple[RunConfig, Tokenizer]:
    """Return the resolved recipe with its teacher, and its tokenizer.

    Raises:
        ConfigError, DataError, TokenizerError: a mistake of the user, on every rank.
    """
    opened = partial(open_tokenizer, config.tokenizer.path, config.model.vocab_size)
    tokenizer, vocab_size = topology.run_on_rank_0_first(opened)
    config = config.with_values("model", vocab_size=vocab_size)
    config = topology.run_on_rank_0_first(lambda: with_teacher(config, tokenizer))
    refuse_other_teacher(config.teacher, topology)
    topology.run_on_rank_0(partial(check_hooks, config.logging))
    return config, tokenizer


def find_start(
    config: RunConfig, tokenizer: Tokenizer, manager: CheckpointManager, topology: Topology, phase: int = 0
) -> Path | None:
    """Return the checkpoint to resume from, None for a fresh run, before the sample indexes are built (takes long).

    Raises:
        ConfigError, CheckpointError: the checkpoint is of other settings, or a fresh run lacks its source of weights.
    """
    manager.check_shared()
    manager.clean_leftovers()
    newest = manager.find_resumable()
    if newest is not None:
        if saved_state(newest).phase == phase:
            topology.run_on_rank_0_first(lambda: refuse_changed_settings(newest, config))
    elif config.initialize_from is None:
        refuse_missing_source(config.initialize_moments, config.initialize_layers)
    elif topology.is_main:
        warn_of_other_tokens(config.initialize_from, tokenizer)
    return newest


def build_hooks(
    config: RunConfig, run_dir: Path, topology: Topology, stop_signal: StopSignal | None = None
) -> list[Hook]:
    """Build metrics, trackers, the user's hooks and status on rank 0, and the profiler on every rank if enabled."""
    hooks: list[Hook] = []
    if topology.is_main:
        interval_steps, flops = config.logging.interval_steps, partial(useful_flops_per_row, config)
        peak = peak_row_seconds(config.logging.peak_tflops, config.training.precision, topology.world_size, flops)
        hooks.append(MetricsWriter(run_dir / METRICS_NAME, interval_steps, peak))
        hooks += build_trackers(config.logging, run_dir, peak)
        for hook in user_hooks(config.logging):
            hooks.append(hook(config) if takes_config(hook) else hook())  # type: ignore[call-arg]
        hooks.append(StatusHook(run_dir, interval_steps, stop_signal))
    if config.profiler.num_steps > 0:
        hooks.append(ProfilerHook(config.profiler, run_dir / PROFILE_DIR, topology.rank))
    return hooks


def refuse_missing_source(moments: bool, layers: Sequence[int] | str | None) -> None:
    """Raise ConfigError if settings need initialize_from, which is not set."""
    if moments:
        raise ConfigError(
            "initialize_moments is true, but initialize_from is not set: name the run that has them, e.g. "
            "--set initialize_from=runs/first, or set initialize_moments=false"
        )
    if layers is not None:
        raise ConfigError(
            f"initialize_layers is {layers}, but initialize_from is not set: name the model whose "
            "layers initialize this one, e.g. the teacher, or set initialize_layers=null for random weights"
        )


def refuse_other_teacher(teacher: TeacherConfig, topology: Topology) -> None:
    """Raise ConfigError on every rank if a rank has another teacher than rank 0."""
    own, first = teacher.fingerprint, topology.broadcast_object(teacher.fingerprint)
    for rank in topology.gather_some(None if own == first else str(own)):
        raise ConfigError(
            f"teacher.path: {teacher.path} holds other files on rank {rank} than on rank 0; copy the same folder to "
            "every node"
        )


def engine_builder(
    config: RunConfig, deepspeed_config: dict[str, Any], objective: Objective, topology: Topology
) -> Callable[[], Engine]:
    """List the layers and choose the kernels of a run; return the function that builds its engine.

    The engine has the values of frozen parameters; its weights are not set. Raises ConfigError or KernelError for
    layers and kernels that cannot be had; the function raises as Engine does.
    """

    def kernels_of(precision: str) -> KernelSet:
        return KernelSet(dict(config.kernels), device_type(), DTYPES[precision])

    training, kernels = config.training, kernels_of(config.training.precision)
    stage = ZeroSettings.of_json(deepspeed_config).stage
    build = ModelBuild(
        (*objective.outputs, *objective.taps),
        kernels,
        parallel_context(config.parallel, training, config.model.drops, topology),
        recompute=training.activation_checkpointing,
        compile=compile_setting(training, config.parallel, stage, device_type()),
        shares_rows=config.data.shares_rows,
    )
    # Continuations choose tokens from the logits.
    read_logits = [str(objective.written_tokens)] if config.evaluation.continues else []
    fields = [field.name for field in objective.fields(config.data)]
    program = build_program(config.model, build, objective, config.teacher, kernels_of, read_logits, fields)
    fix_others(program.facts, training.only)

    def build_engine() -> Engine:
        with explain_out_of_memory(config):
            engine = Engine(config, deepspeed_config, program, objective, topology)
        layers = f", layers compiled ({training.compile_mode})" if training.compile else ""
        logger.info("kernels: %s, %s%s", kernels.describe(), engine.optimizer_choice, layers)
        if objective.teacher_outputs:
            engine.load_frozen(teacher_values(str(config.teacher.path)))
        return engine

    return build_engine


def initialize_weights(engine: Engine, source: Path | str | None = None) -> None:
    """Set the parameters to fresh values by (seed, name), or weights (and moments) to those of `initialize_from`.

    `source` is the checkpoint of a run that `initialize_from` names.
    """
    config = engine.config
    source = source or config.initialize_from
    if source is not None:
        take_weights(source, engine, 0 if config.initialize_moments else None, layers=config.initialize_layers)
        return
    held = {fragment.name for fragment in engine.fragments()}
    names = [name for name in engine.program.trained_shapes if name in held]
    engine.load_weights((name, engine.program.initial_value(name, config.training.seed)) for name in names)


def take_weights(
    source: str | Path, engine: Engine, updates: int | None,
    layers: Sequence[int] | Literal["spread"] | None = None, compares: bool = True,
) -> None:  # fmt: skip
    """Set the parameters to those of `source`, and moments to those after `updates` updates; None leaves them.

    `layers` and `compares` are those of load_initial_weights.
    """
    config, outputs = engine.config, engine.objective.outputs
    fresh = partial(engine.program.initial_value, seed=config.training.seed)
    load_values = partial(load_initial_weights, source, config.model, outputs, fresh, layers, compares)
    values = engine.topology.run_on_rank_0_first(load_values)
    load_moments = partial(load_initial_moments, source, config.optimizer.name, engine.program)
    moments = {} if updates is None else engine.topology.run_on_rank_0_first(load_moments)
    engine.load_weights(values)
    if not engine.average.kinds:
        moments.pop(EMA_KIND, None)
    if moments:
        engine.prepare_optimizer_state(updates or 0, list(moments))
    for kind, named in moments.items():
        engine.load_weights(named, kind)
    logger.info("%s taken from %s", " and ".join(("weights", *moments)), source)


def begin_phase(
    folder: Path, engine: Engine, phases: Sequence[RunPhase], number: int, data: Mapping[str, Any]
) -> TrainState:
    """Load the last checkpoint of the phase before and return the state in which phase `number` begins.

    `data` describes its rows. Raises CheckpointError if the checkpoint is not of the end of the phase before, rows
    cannot continue, or the model does not fit.
    """
    described, phase = read_saved_state(folder), phases[number]
    if phase_to_train(folder, phases) != number:
        raise CheckpointError(
            f"{folder} is in the middle of an earlier phase than {phase.describe()}, in which the run is: no later "
            "checkpoint is intact. Start it again: it continues there"
        )
    if phase.continues:
        refuse_changed_data(folder, described["data"], data)
    reader, kept = engine.topology.run_together(lambda: CheckpointReader(folder)), phase.phase.moments
    scalars = reader.scalars
    updates = {"keep": int(scalars.get("optimizer_updates", 0)), "recount": 0}
    take_weights(folder, engine, updates.get(kept), compares=False)
    if kept == "keep":
        engine.restore_scalars(scalars)
    if phase.continues:
        load_carried(engine, reader, described["environment"])
    logger.info("%s begins: %s", phase.describe(), "rows continue" if phase.continues else "rows start again")
    return saved_state(folder).begin_phase(phase.number, phase.continues)


def write_run_folder(text: str, tokenizer: Tokenizer, run_dir: Path, step: int) -> None:
    """Write config.yaml (`text`) and tokenizer/; keep a config.yaml that differs as config-until-step-STEP.yaml."""
    path, kept = run_dir / "config.yaml", run_dir / f"config-until-step-{step:08d}.yaml"
    if step and path.is_file() and path.read_text(encoding="utf-8") != text and not kept.exists():
        atomic.write_text(kept, path.read_text(encoding="utf-8"))
    atomic.write_text(path, text)
    with atomic.output_folder(run_dir / "tokenizer") as folder:
        tokenizer.save(folder)
