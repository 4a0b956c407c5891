"""Bytes that each axis of parallelism sends in an optimizer step, by collective, and that its update moves in memory.

They are counted in the two ways that tests compare with:

- data-parallel collectives as DeepSpeed's comms logger (comm/comm.py: bytes of the tensor handed in): the complete
  tensor of an all-reduce or reduce-scatter, but of an all-gather the share that a rank contributes;
- tensor-parallel and context-parallel ones as parallel/context.py: the complete tensor of each (the result of an
  all-gather).

Data-parallel messages follow from the elements of the parameters, the others are measured (measure.py). What gradients
and the update move in memory is in addition to the backward pass; tests/dist/test_updates.py counts it on engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ctxlm_ds.apps.plan.layouts import BYTES, Layout
from ctxlm_ds.apps.plan.states import FLOAT, StageParameters, averages_in_place, total_elements, uses_bf16_optimizer
from ctxlm_ds.parallel.context import CONTEXT
from ctxlm_ds.recipe.json_source import ZeroSettings
from ctxlm_ds.recipe.schema import TrainingConfig
from ctxlm_ds.recipe.sections import OptimizerSection


@dataclass(frozen=True, slots=True)
class Message:
    """All messages of one kind of a rank during a step."""

    axis: str
    """`data` (of context parallelism too), `tensor`, `context` or `pipeline`."""
    operation: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` or `send`."""
    num_bytes: float
    """Bytes as in the module's docstring."""
    ranks: int
    purpose: str = ""

    @property
    def counted(self) -> str | None:
        """Name of the operation in a TrafficCounter; None if layers do not send it."""
        return {"tensor": self.operation, "context": CONTEXT + self.operation}.get(self.axis)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a rank sends on a ring: 2(n-1)/n of an all-reduce's, else (n-1)/n of the complete tensor's."""
        share = (self.ranks - 1) / self.ranks
        if self.operation == "all_reduce":
            return 2 * share * self.num_bytes
        if self.operation == "all_gather" and self.axis == "data":
            return share * self.ranks * self.num_bytes
        return self.num_bytes if self.operation == "send" else share * self.num_bytes


def data_messages(
    training: TrainingConfig, layout: Layout, parameters: StageParameters, zero: ZeroSettings, tied: Sequence[int] = ()
) -> list[Message]:
    """List gradients and weights over the ranks of one stage that have copies of the weights.

    `tied` has the elements of each parameter that the forward pass uses twice (stage 3 may gather it each time).
    """
    if layout.replicas == 1:
        return []
    weight, ranks = BYTES[training.precision], layout.replicas
    micro_batches = layout.num_micro_batches(training.global_batch_size)
    if zero.stage == 0:
        return [Message("data", "all_reduce", FLOAT * parameters.num_elements, ranks, "gradients")]
    agreed = Message("data", "all_reduce", _scalars(training, layout, parameters, zero), ranks, "gradient norm")
    if zero.stage == 3:
        return [*_stage3_messages(parameters, zero, ranks, weight, micro_batches, tied), agreed]
    gathered = Message("data", "all_gather", weight * parameters.padded(ranks) // ranks, ranks, "weights")
    if uses_bf16_optimizer(training, zero):
        reduced = FLOAT * parameters.padded(ranks)
        return [Message("data", "reduce_scatter", reduced, ranks, "gradients"), agreed, gathered]
    sums_in_fp32 = zero.stage == 1 and training.grad_accum_dtype == "fp32" and training.precision == "bf16"
    sent = (FLOAT if sums_in_fp32 else weight) * parameters.num_elements
    reduced = sent * (micro_batches if zero.stage == 2 else 1)
    return [Message("data", "all_reduce", reduced, ranks, "gradients"), agreed, gathered]


def _scalars(training: TrainingConfig, layout: Layout, parameters: StageParameters, zero: ZeroSettings) -> int:
    """Return the bytes of the gradient norm and the overflow flag.

    Ranks reduce them over the copies of a model, and once more over its parts if it has several.
    """
    split = layout.tensor * layout.pipeline > 1
    if uses_bf16_optimizer(training, zero):
        return FLOAT * (2 if split else 1)
    norm = FLOAT * len(parameters.groups) * (2 if zero.stage == 3 else 1)
    # Otherwise the norm shows an overflow (training/engine/update.py).
    overflow = 1 if training.precision != "fp32" and zero.stage != 3 and zero.offload_optimizer else 0
    return (norm + overflow) * (2 if split else 1)


def _stage3_messages(
    parameters: StageParameters, zero: ZeroSettings, ranks: int, weight: int, micro_batches: int, tied: Sequence[int]
) -> Iterator[Message]:
    """Yield stage 3's messages: small (persistent) parameters are gathered after the update, others per micro-batch.

    Others are gathered once if the backward pass comes before max_reuse_distance elements have passed, else for every
    use, forward and backward.
    """
    total = parameters.padded_each(ranks)
    others = total_elements(parameters.sizes, ranks, above=zero.persistence_threshold)
    # The backward pass goes in opposite order: the parameters of the last half of the distance stay gathered.
    kept = min(others, max(0, zero.max_reuse_distance) / 2 if 2 * total > zero.max_reuse_distance else others)
    padded_tied = total_elements(Counter(tied), ranks, above=zero.persistence_threshold)
    again = (others - kept) + (2 * padded_tied if kept < others else 0)
    gathered = total - others + micro_batches * (others + again)
    yield Message("data", "reduce_scatter", micro_batches * weight * total, ranks, "gradients")
    yield Message("data", "all_gather", weight * gathered // ranks, ranks, "weights")


NORM_BYTES, CLIP_BYTES, JOIN_BYTES = 4, 8, 8
STAGE_3_BYTES = 30
"""Bytes per element of stage 3's optimizer in addition: fp32 gradient, norm, flat copy, weight; counted 26 to 34."""
FIRST_SUM_BYTES, NEXT_SUM_BYTES = 6, 10
"""Bytes per element of the Bf16Optimizer: bf16 is copied into an fp32 sum (2 + 4), or added to it (2 + 4 + 4)."""
FLATTEN_BYTES = 16
"""Bytes per element of stage 0's all-reduce: gradients are copied into a flat buffer and back (8 + 8)."""
BUCKET_MOVES = 10
"""Times that stage 1 reads or writes a gradient: bucket, average, copy, partition."""
STAGE_2_MOVES, STAGE_2_SHARE_BYTES = 6, 22
"""Times that stages 2 and 3 read or write a micro-batch's gradient; bytes to add it to the rank's fp32 partition."""


def gradient_bytes(
    training: TrainingConfig, parameters: StageParameters, zero: ZeroSettings, data_ranks: int, micro_batches: int
) -> int:
    """Return the bytes that summing and reducing the gradients of a step's micro-batches moves."""
    elements, later = parameters.num_elements, micro_batches - 1
    weight, each_sum = BYTES[training.precision], BYTES[training.grad_accum_dtype]
    if uses_bf16_optimizer(training, zero):
        return elements * (FIRST_SUM_BYTES + NEXT_SUM_BYTES * later)
    # autograd reads both and writes their sum.
    summed = 3 * each_sum * later * elements
    if averages_in_place(training, zero, data_ranks):
        return summed
    if zero.stage == 0:
        return summed + FLATTEN_BYTES * elements
    if zero.stage == 1:
        return summed + BUCKET_MOVES * weight * elements
    return micro_batches * (STAGE_2_MOVES * weight + STAGE_2_SHARE_BYTES // data_ranks) * elements


def optimizer_bytes(
    optimizer: OptimizerSection, parameters: StageParameters, zero: ZeroSettings, data_ranks: int
) -> int:
    """Return the bytes that the optimizer moves in its share of the parameters."""
    ranks = data_ranks if zero.stage else 1
    matrices = total_elements(parameters.matrix_group) // ranks
    others = parameters.padded(ranks) // ranks - matrices
    return optimizer.bytes_per_element * others + optimizer.bytes_per_matrix_element * matrices


def update_bytes(
    training: TrainingConfig,
    optimizer: OptimizerSection,
    parameters: StageParameters,
    zero: ZeroSettings,
    data_ranks: int,
) -> int:
    """Return the bytes that norm, clipping, the optimizer and the copy of its weights move."""
    ranks = data_ranks if zero.stage else 1
    each = CLIP_BYTES if optimizer.gradient_clipping else 0
    each += STAGE_3_BYTES if zero.stage == 3 else NORM_BYTES
    if 0 < zero.stage < 3:
        joins = training.grad_accum_dtype == training.precision  # others are summed in a flat tensor
        each += FLOAT + BYTES[training.precision] + (JOIN_BYTES if joins else 0)
    return each * (parameters.padded(ranks) // ranks) + optimizer_bytes(optimizer, parameters, zero, data_ranks)
