"""Checks of combinations of settings: each problem has its settings, their values and a remedy.

Rules of one entry (a family, an objective, an optimizer) are in its own section, layouts over ranks in layout.py.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ctxlm_ds.recipe.choices import CHOICES, DATA, MODEL, OBJECTIVE, listed
from ctxlm_ds.recipe.layout import layout_problems
from ctxlm_ds.recipe.problems import MAX_NAME_CHARACTERS, Problem, raise_problems
from ctxlm_ds.recipe.schema import CheckpointConfig, EvaluationConfig, ProfilerConfig, RunConfig, TrainingConfig
from ctxlm_ds.recipe.sections import DataSection, ModelSection, ObjectiveSection, OptimizerSection, ScheduleSection
from ctxlm_ds.recipe.source_rules import source_problems, teacher_problems

JUDGED_FOLDERS = ("checkpoint", "hf")
"""A judged checkpoint and its export, in the folder that has a folder for each task (apps/evaluate/during_run.py)."""


def check_config(config: RunConfig, world_size: int | None) -> None:
    """Raise a ConfigError that lists all combinations that cannot work; `world_size` is None if not known yet."""
    raise_problems(f"recipe {config.name}", find_problems(config, world_size))


def find_problems(config: RunConfig, world_size: int | None = None) -> list[Problem]:
    """Return every impossible combination without raising."""
    model, data, objective, training = config.model, config.data, config.objective, config.training
    return [
        *model.problems(),
        *model.row_problems(data),
        *data.problems(model),
        *objective.problems(data),
        *objective.model_problems(model),
        *_check_targets(model, data, objective),
        *fit_problems(model, data, objective),
        *source_problems(data, objective),
        *teacher_problems(config.teacher, model, data, objective, config.parallel),
        *_check_name(config.name),
        *_check_start(config.initialize_moments, config.initialize_layers, config.optimizer.handed_over),
        *config.optimizer.problems(config.kernels.optimizer),
        *_check_width(config.model, config.optimizer),
        *_check_training(training, config.profiler),
        *([] if config.phases else _check_schedule(config.schedule, training.max_steps, config.optimizer)),
        *_check_lanes(data, training, config.evaluation),
        *_check_evaluation(config.evaluation, objective),
        *_check_downstream(config.evaluation, config.checkpoint, model.family),
        *layout_problems(config, world_size),
    ]


def total_schedule_steps(schedule: ScheduleSection, max_steps: int) -> int:
    """Return the schedule step at which the decay ends."""
    return schedule.total_steps or schedule.start_step + max_steps


def warmup_schedule_steps(schedule: ScheduleSection, max_steps: int) -> int:
    """Return the steps of warmup, or 0; a fraction is rounded down (2,000 for 28.43 % of 7,038, as published)."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    total = total_schedule_steps(schedule, max_steps)
    return int(round((schedule.warmup_fraction or 0.0) * total, 6))


def schedule_warnings(schedule: ScheduleSection, max_steps: int) -> list[str]:
    """Return a sentence if the run ends before its warmup does."""
    warmup, last = warmup_schedule_steps(schedule, max_steps), schedule.start_step + max_steps
    if not 0 < last <= warmup:
        return []
    return [
        f"the warmup of {warmup:,} steps is not over when the run ends (training.max_steps "
        f"{max_steps:,}): the learning rate never reaches its peak; set schedule.warmup_fraction, "
        "with schedule.warmup_steps: null"
    ]


def unused_settings(config: RunConfig) -> list[str]:
    """Return one sentence for each changed setting that has no effect, for a note at the start."""
    idle = {
        "data.temperature": config.data.blend != "temperature",
        "training.initial_loss_scale_power": config.training.precision != "fp16",
        "anomalies.spike_threshold": config.anomalies.spike == "ignore",
        "anomalies.spike_window_steps": config.anomalies.spike == "ignore",
        "anomalies.max_skips": "skip" not in (config.anomalies.non_finite, config.anomalies.spike),
        "anomalies.max_rollbacks": "rollback" not in (config.anomalies.non_finite, config.anomalies.spike),
        "training.compile_mode": not config.training.compile,
        "parallel.pipeline_partition": config.parallel.pipeline_parallel_size == 1,
    }
    for section in (*CHOICES, "evaluation"):
        idle |= {f"{section}.{name}": True for name in getattr(config, section).idle_settings}
    sentences = []
    for path, without_effect in idle.items():
        section, name = path.split(".")
        holder = getattr(config, section)
        value, default = getattr(holder, name), type(holder).model_fields[name].get_default(call_default_factory=True)
        if without_effect and value != default:
            sentences.append(f"{path}: {value} has no effect with the other settings of this recipe")
    keep = config.checkpoint.keep_every_steps
    if keep is not None and keep % config.checkpoint.interval_steps:
        sentences.append(
            f"checkpoint.keep_every_steps: {keep} is not a multiple of checkpoint.interval_steps "
            f"{config.checkpoint.interval_steps}: few checkpoints match it"
        )
    return sentences


def _check_targets(model: ModelSection, data: DataSection, objective: ObjectiveSection) -> Iterator[Problem]:
    if any(objective.problems(data)):
        return
    longest, target = model.longest_sequence, max(objective.stack_lengths(data))
    if longest is not None and data.seq_length <= longest < target:
        text = (
            f"{data.seq_length}: its targets have up to {target} tokens, more than the model's {longest} "
            "positions; shorten the rows or raise model.max_position_embeddings"
        )
        yield Problem("data.seq_length", text, ("objective", "model.max_position_embeddings"))


def _check_name(name: str) -> Iterator[Problem]:
    if "/" in name or name in ("", ".", ".."):
        yield Problem("name", f'"{name}" cannot name a folder (runs/NAME); leave out the slashes')
    if len(name) > MAX_NAME_CHARACTERS:
        yield Problem("name", f"{len(name)} characters are too long; give at most {MAX_NAME_CHARACTERS}")


def _check_start(moments: bool, layers: Sequence[int] | str | None, handed_over: bool) -> Iterator[Problem]:
    if layers is not None and moments:
        text = "true, but initialize_layers makes another model, which has no moments; set false"
        yield Problem("initialize_moments", text, ("initialize_layers",))
    if handed_over and moments:
        text = "true, but moments of an optimizer of the DeepSpeed JSON are unknown before its first update; set false"
        yield Problem("initialize_moments", text, ("optimizer.name",))


def _check_width(model: ModelSection, optimizer: OptimizerSection) -> Iterator[Problem]:
    if getattr(model, "relative_width", None) is not None and not optimizer.follows_width():
        text = (
            "given, but only the rates of adamw, stable_adamw and muon with optimizer.matrix_scale original follow the "
            "width; choose one of them, or null"
        )
        yield Problem("model.base_width", text, ("optimizer.name",))


def _check_training(training: TrainingConfig, profiler: ProfilerConfig) -> Iterator[Problem]:
    if profiler.num_steps and profiler.start_step >= training.max_steps:
        text = f"{profiler.start_step} is never reached: training.max_steps is {training.max_steps}"
        yield Problem("profiler.start_step", text, ("training.max_steps", "profiler.num_steps"))
    if training.grad_accum_dtype not in ("fp32", training.precision):
        text = (
            f"{training.grad_accum_dtype} does not fit training.precision {training.precision}; "
            f"set fp32{'' if training.precision == 'fp32' else ' or ' + training.precision}"
        )
        yield Problem("training.grad_accum_dtype", text, ("training.precision",))


def naming_problems(data: DataSection, run_dir: str | None) -> Iterator[Problem]:
    """Yield names that cannot be part of a figure's name, and a run directory that cannot be a run's own."""
    names = {f"train[{number}]": source.name for number, source in enumerate(data.train)}
    names |= {f"validation[{number}]": source.name for number, source in enumerate(data.validation)}
    for source, name in names.items():
        if name is not None and (not name.strip() or ("/" in name and source.startswith("validation"))):
            text = f'"{name}" cannot be part of a name such as eval/NAME/loss; give a name without slashes'
            yield Problem(f"data.{source}.name", text)
    folder = Path(run_dir or "runs/NAME")
    if folder.name in ("", "..") or folder.parts[0].startswith("~"):
        text = f'"{run_dir}" cannot be the folder of one run; give a path such as runs/NAME (no ~)'
        yield Problem("run_dir", text)
    elif folder.is_file():
        yield Problem("run_dir", f'"{run_dir}" is a file; give another path')


def _check_schedule(schedule: ScheduleSection, max_steps: int, optimizer: OptimizerSection) -> Iterator[Problem]:
    total, warmup = total_schedule_steps(schedule, max_steps), warmup_schedule_steps(schedule, max_steps)
    peak = optimizer.learning_rate
    steps = ("schedule.total_steps", "schedule.start_step", "training.max_steps")
    if schedule.warmup_steps is not None and schedule.warmup_fraction is not None:
        text = (
            f"{schedule.warmup_fraction:g} and schedule.warmup_steps {schedule.warmup_steps} are both given; "
            "keep one (set the other to null)"
        )
        yield Problem("schedule.warmup_fraction", text, ("schedule.warmup_steps",))
    elif warmup > total:
        text = (
            f"a warmup of {warmup} steps does not end within the schedule's {total} steps; "
            "shorten it or raise schedule.total_steps or training.max_steps"
        )
        yield Problem("schedule.warmup_steps", text, ("schedule.warmup_fraction", *steps))
    else:
        yield from schedule.problems(total, warmup)
    if schedule.final_learning_rate > peak:
        text = f"{schedule.final_learning_rate:g} is above the peak, optimizer.learning_rate {peak:g}"
        yield Problem("schedule.final_learning_rate", text, ("optimizer.learning_rate",))
    last = schedule.start_step + max_steps - 1
    dead = schedule.decays_to_the_end and schedule.final_learning_rate == 0.0
    if dead and last > total:
        text = (
            f"{total} is before the run's last schedule step {last} (start_step {schedule.start_step} + "
            f"training.max_steps {max_steps} - 1): the steps after it would run at learning rate 0; "
            "raise it, lower training.max_steps, or set schedule.final_learning_rate"
        )
        yield Problem("schedule.total_steps", text, ("schedule.start_step", "training.max_steps", "schedule.name"))


def _check_lanes(data: DataSection, training: TrainingConfig, evaluation: EvaluationConfig) -> Iterator[Problem]:
    if not data.in_lanes:
        return
    name, sources = f"data.sample_format {data.sample_format}", data.train
    if len(sources) > 1:
        text = f"{len(sources)} sources: {name} reads one in lanes; join them with ctxlm merge"
        yield Problem("data.train", text, ("data.sample_format",))
    elif data.blend != "concatenate" or any(source.epochs is not None for source in sources):
        text = f"{data.blend}, epochs {sources[0].epochs}" if sources else data.blend
        yield Problem("data.blend", f"{text}: {name} blends nothing; leave blend and epochs out", ("data.train",))
    if training.batch_ramp is not None:
        text = f"the batch cannot grow: {name} reads a lane of text in each of its rows; set null"
        yield Problem("training.batch_ramp", text, ("data.sample_format",))
    lanes, rows = training.global_batch_size, evaluation.max_rows
    if (data.validation or data.split) and rows < 2 * lanes:
        text = (
            f"{rows} rows in {lanes} lanes, as many as training.global_batch_size: most rows would begin a lane, so "
            f"the loss would be that of a model without a state; set at least {2 * lanes}, better {8 * lanes}"
        )
        yield Problem("evaluation.max_rows", text, ("training.global_batch_size", "data.sample_format"))


def _check_evaluation(evaluation: EvaluationConfig, objective: ObjectiveSection) -> Iterator[Problem]:
    share, trained = evaluation.mask_prob, getattr(objective, "mask_prob", 0.0)
    if share is not None and not trained:
        text = f"{share:g}: objective.name {objective.name} masks no tokens; set null"
        yield Problem("evaluation.mask_prob", text, ("objective.name",))
    elif share is not None and not 0.0 < share <= trained:
        text = f"{share:g}: expected above 0, at most objective.mask_prob {trained:g}, for which rows have room"
        yield Problem("evaluation.mask_prob", text, ("objective.mask_prob",))
    if not evaluation.continues:
        return
    setting = "evaluation.continuations" if evaluation.continuations else "evaluation.prompts"
    entry = OBJECTIVE.registry.get(objective.name)
    if not (entry.next_tokens or entry.masked_tokens or entry.target_tokens):
        text = f"objective.name {objective.name} {entry.why_no_text}, so it writes no text; leave it out"
        yield Problem(setting, text, ("objective.name",))
    if evaluation.prompts and objective.needs_languages:
        text = "prompts have no language token, which the decoder begins with; use evaluation.continuations"
        yield Problem("evaluation.prompts", text, ("objective.language_tokens",))


def _check_downstream(evaluation: EvaluationConfig, checkpoint: CheckpointConfig, family: str) -> Iterator[Problem]:
    interval = checkpoint.interval_steps
    names = [task.name for task in evaluation.downstream]
    for at, task in enumerate(evaluation.downstream):
        setting = f"evaluation.downstream[{at}]"
        if MODEL.registry.get(family).export is None:
            text = f"{task.task}: model.family {family} has no class of transformers to fine-tune; leave it out"
            yield Problem(setting, text, ("model.family",))
        if task.every_steps % interval:
            text = f"{task.every_steps} is no multiple of checkpoint.interval_steps {interval}: checkpoints are judged"
            yield Problem(f"{setting}.every_steps", text, ("checkpoint.interval_steps",))
        if task.name in JUDGED_FOLDERS:
            yield Problem(f"{setting}.task", f"{task.name} is the name of another folder there; rename the file")
        if names.index(task.name) < at:
            yield Problem(f"{setting}.task", f"{task.name} is named twice, and its scores would be one curve")


def fit_problems(model: ModelSection, data: DataSection, section: ObjectiveSection) -> Iterator[Problem]:
    """Yield problems of combining family, objective and sample format."""
    family = MODEL.registry.get(model.family)
    objective = OBJECTIVE.registry.get(section.name)(section)
    sample_format = DATA.registry.get(data.sample_format)
    judged = [objective]
    if not any(term.weight for term in objective.terms):
        names = [f"objective.{name}" for name in type(section).model_fields if name.endswith("_weight")]
        names = names or [OBJECTIVE.path]
        yield Problem(names[-1], "all weights are 0, so nothing is learnt; raise one", tuple(names[:-1]))
    if section.z_loss and not objective.word_labels:
        text = f"{section.z_loss:g}: no loss of objective.name {section.name} takes the logits of words; set 0"
        yield Problem("objective.z_loss", text, ("objective.name",))
    if not _model_fits(family, objective):
        yield _objective_problem(model.family, family, objective, section)
        # Check the format against the objectives that the family allows, so that one mistake is one problem.
        judged = [other for other in OBJECTIVE.entries().values() if _model_fits(family, other)]
    if judged and not any(_format_fits(sample_format, other) for other in judged):
        yield _format_problem(family, judged, data.sample_format, sample_format)


def _model_fits(family: Any, objective: Any) -> bool:
    return set(objective.outputs) <= family.outputs


def _format_fits(sample_format: Any, objective: Any) -> bool:
    has_label = objective.sequence_label in (None, sample_format.sequence_label)
    lanes = sample_format.lane_directions
    has_lanes = lanes == objective.lane_directions or lanes == 0 and objective.lane_directions == 1
    return bool(has_label and has_lanes and objective.shifted == sample_format.shifted)


def _objective_problem(family_name: str, family: Any, objective: Any, section: ObjectiveSection) -> Problem:
    missing = sorted(set(objective.outputs) - family.outputs)
    for name, field in type(section).model_fields.items():
        if field.is_required():
            continue
        default = field.get_default(call_default_factory=True)
        other = type(objective)(section.model_copy(update={name: default}))
        if _model_fits(family, other) and any(term.weight for term in other.terms):
            needs = f"{getattr(section, name)} needs the model outputs {listed(missing, 'and')}, which {MODEL.path}"
            text = f"{needs} {family_name} does not compute; set {default}"
            return Problem(f"objective.{name}", text, (MODEL.path, OBJECTIVE.path))
    objectives = [name for name, other in OBJECTIVE.entries().items() if _model_fits(family, other)]
    families = [name for name, other in MODEL.entries().items() if _model_fits(other, objective)]
    return Problem(
        OBJECTIVE.path,
        f"{objective.name} needs the model outputs {listed(missing, 'and')}, which {MODEL.path} "
        f"{family_name} does not compute; {_remedy({OBJECTIVE.path: objectives, MODEL.path: families})}",
        (MODEL.path,),
    )


def _format_problem(family: Any, judged: list[Any], format_name: str, sample_format: Any) -> Problem:
    objective = judged[0]
    name = f"{OBJECTIVE.path} {objective.name}"
    if objective.lane_directions == 2 and sample_format.lane_directions < 2:
        reason = f"reads no text backward for {name}"
    elif sample_format.lane_directions > objective.lane_directions:
        reason = f"continues text from row to row, of which {name} makes no use"
    elif objective.shifted and not sample_format.shifted:
        reason = f"leaves no token after the last input for {name} to predict"
    elif sample_format.shifted and not objective.shifted:
        reason = f"keeps the last token of a sample as a label, which {name} does not read"
    elif sample_format.sequence_label is None and sample_format.makes_pairs:
        reason = f"gives its segments no label for {name} to read"
    elif sample_format.sequence_label is None:
        reason = f"has no second segment for {name} to judge"
    else:
        reason = f"labels its pairs with {sample_format.sequence_label}, {name} reads {objective.sequence_label}"
    formats = [name for name, other in DATA.entries().items() if any(_format_fits(other, one) for one in judged)]
    objectives = [
        name
        for name, other in OBJECTIVE.entries().items()
        if _format_fits(sample_format, other) and _model_fits(family, other)
    ]
    return Problem(
        DATA.path,
        f"{format_name} {reason}; {_remedy({DATA.path: formats, OBJECTIVE.path: objectives})}",
        (OBJECTIVE.path, MODEL.path),
    )


def _remedy(fitting: dict[str, list[str]]) -> str:
    choices = [f"{path} to {listed(names)}" for path, names in fitting.items() if names]
    return f"set {', or '.join(choices)}" if choices else "no registered entry fits it"
