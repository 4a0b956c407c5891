"""Checks of a layout over ranks: even splits, and a ZeRO stage that the pipeline supports. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.schema import ParallelConfig, RunConfig, TeacherConfig, TrainingConfig
from ctxlm_ds.recipe.sections import DataSection, ModelSection, ObjectiveSection

MAX_WORLD_SIZE = 10**6
PIPELINE_ZERO_STAGES = (0, 1)
TENSOR = "parallel.tensor_parallel_size"
PIPELINE = "parallel.pipeline_parallel_size"
CONTEXT = "parallel.context_parallel_size"


def layout_problems(
    config: RunConfig, world_size: int | None = None, zero_stage: int | None = None
) -> Iterator[Problem]:
    """Yield every problem of a layout; the number of ranks and the ZeRO stage are None if not known yet."""
    parallel, training = config.parallel, config.training
    size = parallel.tensor_parallel_size
    if size > 1:
        yield from config.model.tensor_parallel_problems(size)
        yield from config.optimizer.tensor_parallel_problems(size, config.kernels.optimizer)
    if parallel.context_parallel_size > 1:
        yield from _context_problems(parallel, config.model, config.data, config.objective)
    if parallel.sequence_parallel:
        yield from _sequence_problems(parallel, training, config.data, config.objective)
    yield from _pipeline_problems(parallel, config.model.num_blocks)
    yield from batch_problems(training, parallel, world_size)
    if zero_stage is not None:
        yield from config.optimizer.stage_problems(zero_stage)
        yield from stage_problems(parallel, training, config.teacher, zero_stage)


def _context_problems(
    parallel: ParallelConfig, model: ModelSection, data: DataSection, objective: ObjectiveSection
) -> Iterator[Problem]:
    size = parallel.context_parallel_size
    yield from model.context_parallel_problems(size, parallel.tensor_parallel_size)
    if not objective.shares_positions:
        text = f"{size}, but objective.name {objective.name} compares attention scores of complete rows; set it to 1"
        yield Problem(CONTEXT, text, ("objective.name",))
    if data.in_lanes:
        text = f"{size}, but rows of data.sample_format {data.sample_format} carry states from end to end; set it to 1"
        yield Problem(CONTEXT, text, ("data.sample_format",))
    uneven = next((length for length in objective.stack_lengths(data) if length % size), None)
    if uneven is not None:
        is_input = uneven == data.seq_length
        row = f"data.seq_length {uneven}" if is_input else f"the {uneven} positions of a decoder's row"
        remedy = "data.seq_length to a multiple" if is_input else f"objective.target_multiple to {size}"
        text = f"{size} does not divide {row}; set {remedy}, or choose another size"
        yield Problem(CONTEXT, text, ("data.seq_length",))


def _sequence_problems(
    parallel: ParallelConfig, training: TrainingConfig, data: DataSection, objective: ObjectiveSection
) -> Iterator[Problem]:
    size, context, micro = parallel.tensor_parallel_size, parallel.context_parallel_size, training.micro_batch_size
    lengths = [length // context for length in objective.stack_lengths(data)]
    uneven = next((length for length in lengths if micro * length % size), None)
    if size == 1:
        text = (
            f"true, but {TENSOR} is 1: it splits positions over tensor-parallel ranks; set it to false, or {TENSOR} "
            "to 2 or more"
        )
        yield Problem("parallel.sequence_parallel", text, (TENSOR,))
    elif uneven is not None:
        nearest = next(
            rows for rows in range(micro, micro + size + 1) if not any(rows * length % size for length in lengths)
        )
        row = "positions of a row of the decoder" if len(lengths) > 1 else "positions and predictions of a row"
        row = "data.seq_length" if uneven == data.seq_length else row
        row += f" / {CONTEXT} {context} =" if context > 1 else ""
        text = (
            f"training.micro_batch_size {micro} x {row} {uneven} = {micro * uneven} positions do not split "
            f"evenly over {TENSOR} {size}; set training.micro_batch_size to {nearest}, or it to false"
        )
        yield Problem("parallel.sequence_parallel", text, (TENSOR, "training.micro_batch_size", "data.seq_length"))


def _pipeline_problems(parallel: ParallelConfig, blocks: int) -> Iterator[Problem]:
    stages = parallel.pipeline_parallel_size
    if stages > blocks:
        text = f"{stages} stages for a model of {blocks} layers: every stage needs one; set it to {blocks} or less"
        yield Problem(PIPELINE, text, ("model",))
    by_hand = parallel.pipeline_layers
    if by_hand is None:
        return
    if len(by_hand) != stages:
        text = (
            f"{by_hand} has {len(by_hand)} stages, but {PIPELINE} is {stages}; give one number per stage, or null to "
            "let parallel.pipeline_partition decide"
        )
        yield Problem("parallel.pipeline_layers", text, (PIPELINE,))
    if sum(by_hand) != blocks:
        text = f"{by_hand} adds up to {sum(by_hand)}, but the model has {blocks} layers; change one"
        yield Problem("parallel.pipeline_layers", text, ("model",))


def batch_problems(training: TrainingConfig, parallel: ParallelConfig, world_size: int | None) -> Iterator[Problem]:
    """Yield problems of splitting the ranks into models and the global batch into micro-batches."""
    rows, micro, ranks = training.global_batch_size, training.micro_batch_size, 1
    if world_size is not None and not 1 <= world_size <= MAX_WORLD_SIZE:
        yield Problem("world size", f"{world_size}: expected a number of ranks from 1 to {MAX_WORLD_SIZE:,}")
        return
    if world_size is not None:
        together = parallel.model_parallel_size
        if world_size % together:
            below = world_size // together * together
            choices = f"{below} or {below + together}" if below else str(together)
            size = parallel.context_parallel_size
            context = f" context_parallel_size {size} x" if size > 1 else ""
            text = (
                f"{world_size} ranks do not split into groups of tensor_parallel_size "
                f"{parallel.tensor_parallel_size} x{context} pipeline_parallel_size "
                f"{parallel.pipeline_parallel_size} = {together}; start {choices} ranks, or change the sizes"
            )
            yield Problem("parallel", text, (TENSOR, PIPELINE, CONTEXT))
            # The batch must be a multiple of the micro-batch on any number of ranks.
            world_size = None
        else:
            ranks = world_size // together
    unit = micro * ranks
    if rows % unit:
        below, above = rows // unit * unit, (rows // unit + 1) * unit
        if world_size is None:
            choices = f"a multiple of {unit} x the data-parallel ranks"
        else:
            choices = f"{below} or {above}" if below else f"{above}"
        kind = "ranks" if parallel.model_parallel_size == 1 else "data-parallel ranks"
        of = f"training.micro_batch_size {micro}" + (f" x {ranks} {kind} = {unit}" if world_size is not None else "")
        fitting = next((size for size in range(micro, 0, -1) if rows % (size * ranks) == 0), None)
        other = f", or training.micro_batch_size to {fitting}" if fitting else ""
        text = f"{rows} is not a multiple of {of}; set it to {choices}{other}"
        yield Problem("training.global_batch_size", text, ("training.micro_batch_size",))
    else:
        yield from _ramp_problems(training, unit)


def _ramp_problems(training: TrainingConfig, unit: int) -> Iterator[Problem]:
    """Yield a problem if the batch does not grow to the global batch in multiples of `unit` rows."""
    rows, ramp = training.global_batch_size, training.batch_ramp
    if ramp is None:
        return
    start, increment, _ = ramp
    involved = ("training.global_batch_size", "training.micro_batch_size")
    if start >= rows or (rows - start) % increment:
        text = f"{list(ramp)}: {start} does not grow by {increment} to training.global_batch_size {rows}; change one"
        yield Problem("training.batch_ramp", text, involved)
    elif start % unit or increment % unit:
        text = (
            f"{list(ramp)}: the number of micro-batches grows, so start and increment must be multiples of "
            f"training.micro_batch_size x data-parallel ranks = {unit}; change them, or use fewer ranks"
        )
        yield Problem("training.batch_ramp", text, involved)


def stage_problems(
    parallel: ParallelConfig, training: TrainingConfig, teacher: TeacherConfig, zero_stage: int
) -> Iterator[Problem]:
    """Yield a problem if DeepSpeed does not support the ZeRO stage with the pipeline or the teacher."""
    if zero_stage == 3 and teacher.precision not in ("run", training.precision):
        text = (
            f"{teacher.precision} under ZeRO stage 3, which partitions all weights in training.precision "
            f"{training.precision}; set it to run, or use stage 0 to 2"
        )
        yield Problem("teacher.precision", text, ("training.precision",))
    stages = parallel.pipeline_parallel_size
    if stages > 1 and zero_stage not in PIPELINE_ZERO_STAGES:
        reason = (
            "it accumulates gradients over the micro-batches of a step, and stage 2 would reduce each of them"
            if zero_stage == 2
            else "each stage would gather its weights for every micro-batch"
        )
        text = (
            f"{zero_stage} does not work with {PIPELINE} {stages}: DeepSpeed's pipeline supports stages 0 and 1 only "
            f"({reason}); use stage 1, or set {PIPELINE} to 1"
        )
        yield Problem("zero_optimization.stage", text, (PIPELINE,))
