"""Parameters, gradients, optimizer states and buffers of a rank, counted by element as DeepSpeed 0.19.8 keeps them.

Sources in deepspeed 0.19.8: runtime/bf16_optimizer.py (bf16 under stage 1 with fp32 accumulation: every rank has all
gradients), runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py, runtime/engine.py (stage 0).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod
from typing import NamedTuple

from ctxlm_ds.apps.plan.layouts import BYTES
from ctxlm_ds.models.program import Program
from ctxlm_ds.parallel.placement import Split, shard_of, vocabulary_rows_per_rank
from ctxlm_ds.recipe.json_source import DEEPSPEED_BUCKET, ZeroSettings
from ctxlm_ds.recipe.schema import TrainingConfig
from ctxlm_ds.recipe.sections import OptimizerSection, UpdateSizes
from ctxlm_ds.training.optimizers.base import FLOAT
from ctxlm_ds.training.optimizers.matrix_work import Matrices, blocks_of

ALIGNMENT = 2
"""Stages 1 and 2 pad each flat group to a multiple of this per rank (nccl_start_alignment_factor)."""


@dataclass(frozen=True)
class StageParameters:
    """Parameters of one rank of one pipeline stage before ZeRO."""

    groups: tuple[Counter[int], ...]
    """The optimizer's groups (with and without weight decay, none empty): number of parameters by their elements."""
    frozen: int = 0
    """Elements that no step changes."""
    matrix_group: Counter[int] = field(default_factory=Counter)
    """The group of the matrices that the optimizer takes complete; it is one of `groups`."""
    matrices: Matrices = Matrices()

    @cached_property
    def sizes(self) -> Counter[int]:
        """Number of trained parameters by their elements."""
        return sum(self.groups, Counter())

    @cached_property
    def num_elements(self) -> int:
        """All trained elements, without padding."""
        return total_elements(self.sizes)

    @property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(self.sizes, default=0)

    def padded(self, ranks: int) -> int:
        """Elements when every group is padded to a multiple of ALIGNMENT x ranks."""
        return sum(round_up(total_elements(group), ALIGNMENT * ranks) for group in self.groups)

    def padded_each(self, ranks: int) -> int:
        """Elements when every parameter is padded to a multiple of the ranks (stage 3)."""
        return total_elements(self.sizes, ranks)


def round_up(number: int, unit: int) -> int:
    """Return the next multiple of `unit`."""
    return -(-number // unit) * unit


def total_elements(sizes: Counter[int], unit: int = 1, above: int = -1) -> int:
    """Add up the parameters of more than `above` elements, each padded to a multiple of `unit`."""
    return sum(count * round_up(size, unit) for size, count in sizes.items() if size > above)


def stage_parameters(
    model: Program,
    names: Iterable[str],
    tensor: int,
    vocab_multiple: int | None = 1,
    optimizer: OptimizerSection | None = None,
) -> StageParameters:
    """Count what tensor-parallel rank 0 holds of the named parameters, each once.

    Matrices that `optimizer` takes complete are a group.
    """
    groups: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    own: Counter[int] = Counter()
    frozen, largest, flops = 0, 0, 0.0
    for name in dict.fromkeys(names):
        facts, size = model.facts[name], local_elements(model, name, tensor, vocab_multiple)
        if not facts.trained:
            frozen += size
        elif optimizer is not None and optimizer.matrix_moments is not None and facts.matrix:
            own[size] += 1
            rows, columns = model.shapes[name]
            largest = max(largest, rows * columns)
            flops += optimizer.matrix_flops(blocks_of(facts, rows), columns)
        else:
            groups[facts.decays][size] += 1
    matrices = Matrices(total_elements(own), largest, flops)
    return StageParameters(tuple(group for group in (own, *groups.values()) if group), frozen, own, matrices)


def local_elements(model: Program, name: str, tensor: int, vocab_multiple: int | None = 1) -> int:
    """Count the elements of a parameter on tensor-parallel rank 0, padding rows of the vocabulary included."""
    return _local_elements(model.shapes[name], model.facts[name].split, tensor, vocab_multiple)


@cache
def _local_elements(shape: tuple[int, ...], split: Split | None, tensor: int, vocab_multiple: int | None) -> int:
    if split is not None and split.axis == "vocabulary":
        return vocabulary_rows_per_rank(shape[0], tensor, vocab_multiple) * prod(shape[1:])
    return shard_of("parameter", split, shape, tensor, 0).num_elements


class StateElements(NamedTuple):
    """Elements on one rank's GPU between steps (gradients: before the update)."""

    parameters: int
    gradients: int
    master: int
    """fp32 copies of the weights."""
    moments: int


def uses_bf16_optimizer(training: TrainingConfig, zero: ZeroSettings) -> bool:
    """Return True if DeepSpeed takes BF16_Optimizer, not ZeRO's (runtime/engine.py _do_optimizer_sanity_check)."""
    in_bf16 = (training.precision, training.grad_accum_dtype) == ("bf16", "fp32")
    return in_bf16 and zero.stage == 1 and not zero.offload_optimizer


def averages_in_place(training: TrainingConfig, zero: ZeroSettings, data_ranks: int) -> bool:
    """Return True if gradients are their average over the ranks already (training/engine/zero_optimizers.py)."""
    return data_ranks == 1 and training.precision == "fp32" and zero.stage < 3 and not zero.offload_optimizer


def state_elements(
    training: TrainingConfig,
    optimizer: OptimizerSection,
    parameters: StageParameters,
    zero: ZeroSettings,
    data_ranks: int,
) -> StateElements:
    """Count the elements on the GPU; offloaded ones are not there."""
    whole, padded = parameters.num_elements, parameters.padded(data_ranks)
    share, moments = padded // data_ranks, len(optimizer.moments)
    # Moments of other parameters that the group of matrices lacks.
    fewer = moments - len(optimizer.moments_of(matrix=True))
    if zero.stage == 0:
        return StateElements(whole, whole, 0, moments * whole - fewer * total_elements(parameters.matrix_group))
    if zero.stage == 3:
        share = parameters.padded_each(data_ranks) // data_ranks
        states = 0 if zero.offload_optimizer else share
        saved = fewer * total_elements(parameters.matrix_group, data_ranks) // data_ranks
        kept = 0 if zero.offload_optimizer else moments * states - saved
        return StateElements(0 if zero.offload_parameters else share, states, states, kept)
    if zero.offload_optimizer:
        return StateElements(padded, 0, 0, 0)
    gradients = share if zero.stage == 2 else (padded if uses_bf16_optimizer(training, zero) else whole)
    saved = fewer * round_up(total_elements(parameters.matrix_group), ALIGNMENT * data_ranks) // data_ranks
    return StateElements(padded, gradients, share, moments * share - saved)


def buffer_bytes(
    training: TrainingConfig, parameters: StageParameters, zero: ZeroSettings, data_ranks: int
) -> tuple[int, int]:
    """Return the bytes of buckets and copies during the backward pass, and during the update.

    Stage 0 flattens up to 500 million elements for one all-reduce after the backward pass; the Bf16Optimizer adds each
    gradient to its fp32 sum; otherwise stages 1 to 3 fill buckets during the pass, two with overlap_comm (none of
    both in place). At the update they copy a rank's gradients, except stage 2 those that it sums in fp32 for 16 bits.
    """
    weight = BYTES[training.precision]
    whole = parameters.num_elements
    in_place = averages_in_place(training, zero, data_ranks)
    if zero.stage == 0:
        return 0, 0 if in_place else FLOAT * min(whole, DEEPSPEED_BUCKET)
    if uses_bf16_optimizer(training, zero):
        return weight * parameters.largest, 0
    buckets = (2 if zero.overlap_comm else 1) * max(min(zero.reduce_bucket, whole), parameters.largest)
    if zero.stage == 3:
        gathered = _live_elements(parameters, zero) + min(zero.prefetch_bucket, whole)
        share = parameters.padded_each(data_ranks) // data_ranks
        return weight * (buckets + min(gathered, whole)), FLOAT * share
    copies = zero.stage == 1 or training.grad_accum_dtype != "fp32" or training.precision == "fp32"
    return 0 if in_place else weight * buckets, copies * FLOAT * parameters.padded(data_ranks) // data_ranks


def workspace_bytes(
    optimizer: OptimizerSection, parameters: StageParameters, zero: ZeroSettings, data_ranks: int
) -> int:
    """Return the bytes that an update holds in addition to its states, without complete matrices."""
    if zero.offload_optimizer:
        return 0
    group = max(total_elements(sizes) for sizes in parameters.groups)
    if not zero.stage:
        sizes = UpdateSizes(False, parameters.num_elements, group, parameters.largest)
    else:
        share, unit = parameters.padded(data_ranks) // data_ranks, ALIGNMENT * data_ranks
        sizes = UpdateSizes(True, share, round_up(group, unit) // data_ranks, parameters.largest)
    return optimizer.workspace(sizes)


def _live_elements(parameters: StageParameters, zero: ZeroSettings) -> int:
    """Return the most elements of stage 3's gathered parameters.

    At the end of the forward pass those stay gathered whose backward pass is nearer than max_reuse_distance, that is
    the last half of it.
    """
    others = total_elements(parameters.sizes, above=zero.persistence_threshold)
    persistent = parameters.num_elements - others
    return persistent + min(others, max(parameters.largest, zero.max_reuse_distance // 2))
