"""States of a rank, what it sends and what an update moves, counted by element as DeepSpeed 0.19.8 keeps them.

Sources in deepspeed 0.19.8: runtime/bf16_optimizer.py (bf16 under stage 1 with fp32 accumulation: every rank has all
gradients), runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py, runtime/engine.py (stage 0).

Messages are counted in the two ways that tests compare with:

- data-parallel collectives as DeepSpeed's comms logger (comm/comm.py: bytes of the tensor handed in): the complete
  tensor of an all-reduce or reduce-scatter, but of an all-gather the share that a rank contributes;
- tensor-parallel and context-parallel ones as parallel/context.py: the complete tensor of each (the result of an
  all-gather).

Data-parallel messages follow from the elements of the parameters, the others are measured (measure.py). What gradients
and the update move in memory is in addition to the backward pass; tests/dist/test_updates.py counts it on engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod
from typing import NamedTuple

from ctxlm_ds.apps.plan.layouts import BYTES, Layout
from ctxlm_ds.models.program import Program
from ctxlm_ds.parallel.context import CONTEXT
from ctxlm_ds.parallel.placement import Split, shard_of, vocabulary_rows_per_rank
from ctxlm_ds.recipe.schema import TrainingConfig
from ctxlm_ds.recipe.sections import OptimizerSection, UpdateSizes
from ctxlm_ds.recipe.zero import DEEPSPEED_BUCKET, ZeroSettings
from ctxlm_ds.training.optimizers.base import FLOAT
from ctxlm_ds.training.optimizers.matrix_work import Matrices, blocks_of

ALIGNMENT = 2
"""Stages 1 and 2 pad each flat group to a multiple of this per rank (nccl_start_alignment_factor)."""
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
    model: Program, names: Iterable[str], tensor: int, vocab_multiple: int | None, optimizer: OptimizerSection
) -> StageParameters:
    """Count what tensor-parallel rank 0 holds of the named parameters, each once; complete matrices are a group."""
    groups: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    own: Counter[int] = Counter()
    frozen, largest, flops = 0, 0, 0.0
    for name in dict.fromkeys(names):
        facts, size = model.facts[name], local_elements(model, name, tensor, vocab_multiple)
        if not facts.trained:
            frozen += size
        elif optimizer.matrix_moments is not None and facts.matrix:
            own[size] += 1
            rows, columns = model.shapes[name]
            largest = max(largest, rows * columns)
            flops += optimizer.matrix_flops(blocks_of(facts, rows), columns)
        else:
            groups[facts.decays][size] += 1
    matrices = Matrices(total_elements(own), largest, flops)
    return StageParameters(tuple(group for group in (own, *groups.values()) if group), frozen, own, matrices)


def local_elements(model: Program, name: str, tensor: int, vocab_multiple: int | None) -> int:
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


@dataclass(frozen=True)
class Partition:
    """How the ranks that have copies of a model's parameters share its states, gradients and updates."""

    training: TrainingConfig
    optimizer: OptimizerSection
    zero: ZeroSettings
    ranks: int
    """Copies of the parameters (`Layout.replicas`)."""

    @property
    def weight(self) -> int:
        """Return the bytes of a weight."""
        return BYTES[self.training.precision]

    @property
    def uses_bf16_optimizer(self) -> bool:
        """Return True if DeepSpeed takes BF16_Optimizer, not ZeRO's (runtime/engine.py _do_optimizer_sanity_check)."""
        in_bf16 = (self.training.precision, self.training.grad_accum_dtype) == ("bf16", "fp32")
        return in_bf16 and self.zero.stage == 1 and not self.zero.offload_optimizer

    @property
    def averages_in_place(self) -> bool:
        """Return True if gradients are their average over the ranks already (training/engine/zero_optimizers.py)."""
        in_fp32 = self.training.precision == "fp32"
        return self.ranks == 1 and in_fp32 and self.zero.stage < 3 and not self.zero.offload_optimizer

    def state_elements(self, parameters: StageParameters) -> StateElements:
        """Count the elements on the GPU; offloaded ones are not there."""
        whole, padded = parameters.num_elements, parameters.padded(self.ranks)
        share, own = padded // self.ranks, len(self.optimizer.moments)
        # Moments of other parameters that the group of matrices lacks.
        fewer, moments = own - len(self.optimizer.moments_of(matrix=True)), own + (self.training.ema is not None)
        if self.zero.stage == 0:
            return StateElements(whole, whole, 0, moments * whole - fewer * total_elements(parameters.matrix_group))
        if self.zero.stage == 3:
            share = parameters.padded_each(self.ranks) // self.ranks
            states = 0 if self.zero.offload_optimizer else share
            saved = fewer * total_elements(parameters.matrix_group, self.ranks) // self.ranks
            kept = 0 if self.zero.offload_optimizer else moments * states - saved
            return StateElements(0 if self.zero.offload_parameters else share, states, states, kept)
        if self.zero.offload_optimizer:
            return StateElements(padded, 0, 0, 0)
        gradients = share if self.zero.stage == 2 else (padded if self.uses_bf16_optimizer else whole)
        saved = fewer * round_up(total_elements(parameters.matrix_group), ALIGNMENT * self.ranks) // self.ranks
        return StateElements(padded, gradients, share, moments * share - saved)

    def buffer_bytes(self, parameters: StageParameters) -> tuple[int, int]:
        """Return the bytes of buckets and copies during the backward pass, and during the update.

        Stage 0 flattens up to 500 million elements for one all-reduce after the backward pass; the Bf16Optimizer adds
        each gradient to its fp32 sum; otherwise stages 1 to 3 fill buckets during the pass, two with overlap_comm (none
        of both in place). At the update they copy a rank's gradients, except stage 2 those that it sums in fp32 for 16
        bits.
        """
        whole = parameters.num_elements
        in_place = self.averages_in_place
        if self.zero.stage == 0:
            return 0, 0 if in_place else FLOAT * min(whole, DEEPSPEED_BUCKET)
        if self.uses_bf16_optimizer:
            return self.weight * parameters.largest, 0
        buckets = (2 if self.zero.overlap_comm else 1) * max(min(self.zero.reduce_bucket, whole), parameters.largest)
        if self.zero.stage == 3:
            gathered = self._live_elements(parameters) + min(self.zero.prefetch_bucket, whole)
            share = parameters.padded_each(self.ranks) // self.ranks
            return self.weight * (buckets + min(gathered, whole)), FLOAT * share
        copies = self.zero.stage == 1 or self.training.grad_accum_dtype != "fp32" or self.training.precision == "fp32"
        return 0 if in_place else self.weight * buckets, copies * FLOAT * parameters.padded(self.ranks) // self.ranks

    def workspace_bytes(self, parameters: StageParameters) -> int:
        """Return the bytes that an update holds in addition to its states, without complete matrices."""
        if self.zero.offload_optimizer:
            return 0
        group = max(total_elements(sizes) for sizes in parameters.groups)
        if not self.zero.stage:
            sizes = UpdateSizes(False, parameters.num_elements, group, parameters.largest)
        else:
            share, unit = parameters.padded(self.ranks) // self.ranks, ALIGNMENT * self.ranks
            sizes = UpdateSizes(True, share, round_up(group, unit) // self.ranks, parameters.largest)
        return self.optimizer.workspace(sizes)

    def _live_elements(self, parameters: StageParameters) -> int:
        """Return the most elements of stage 3's gathered parameters.

        At the end of the forward pass those stay gathered whose backward pass is nearer than max_reuse_distance, that
        is the last half of it.
        """
        others = total_elements(parameters.sizes, above=self.zero.persistence_threshold)
        persistent = parameters.num_elements - others
        return persistent + min(others, max(parameters.largest, self.zero.max_reuse_distance // 2))

    def messages(self, layout: Layout, parameters: StageParameters, tied: Sequence[int] = ()) -> list[Message]:
        """List gradients and weights over the ranks of one stage that have copies of the weights.

        `tied` has the elements of each parameter that the forward pass uses twice (stage 3 may gather it each time).
        """
        ranks = self.ranks
        if ranks == 1:
            return []
        micro_batches = layout.num_micro_batches(self.training.global_batch_size)
        if self.zero.stage == 0:
            return [Message("data", "all_reduce", FLOAT * parameters.num_elements, ranks, "gradients")]
        agreed = Message("data", "all_reduce", self._scalars(layout, parameters), ranks, "gradient norm")
        if self.zero.stage == 3:
            return [*self._stage3_messages(parameters, micro_batches, tied), agreed]
        gathered = Message("data", "all_gather", self.weight * parameters.padded(ranks) // ranks, ranks, "weights")
        if self.uses_bf16_optimizer:
            reduced = FLOAT * parameters.padded(ranks)
            return [Message("data", "reduce_scatter", reduced, ranks, "gradients"), agreed, gathered]
        in_bf16 = (self.training.precision, self.training.grad_accum_dtype) == ("bf16", "fp32")
        sent = (FLOAT if in_bf16 and self.zero.stage == 1 else self.weight) * parameters.num_elements
        reduced = sent * (micro_batches if self.zero.stage == 2 else 1)
        return [Message("data", "all_reduce", reduced, ranks, "gradients"), agreed, gathered]

    def _scalars(self, layout: Layout, parameters: StageParameters) -> int:
        """Return the bytes of the gradient norm and the overflow flag.

        Ranks reduce them over the copies of a model, and once more over its parts if it has several.
        """
        split = layout.tensor * layout.pipeline > 1
        if self.uses_bf16_optimizer:
            return FLOAT * (2 if split else 1)
        norm = FLOAT * len(parameters.groups) * (2 if self.zero.stage == 3 else 1)
        # Otherwise the norm shows an overflow (training/engine/update.py).
        has_flag = self.training.precision != "fp32" and self.zero.stage != 3 and self.zero.offload_optimizer
        return (norm + bool(has_flag)) * (2 if split else 1)

    def _stage3_messages(
        self, parameters: StageParameters, micro_batches: int, tied: Sequence[int]
    ) -> Iterator[Message]:
        """Yield stage 3's messages: small (persistent) parameters are gathered after the update.

        Others are gathered in each micro-batch: once if the backward pass comes before max_reuse_distance elements have
        passed, else for every use, forward and backward.
        """
        ranks, distance = self.ranks, self.zero.max_reuse_distance
        total = parameters.padded_each(ranks)
        others = total_elements(parameters.sizes, ranks, above=self.zero.persistence_threshold)
        # The backward pass goes in opposite order: the parameters of the last half of the distance stay gathered.
        kept = min(others, max(0, distance) / 2 if 2 * total > distance else others)
        padded_tied = total_elements(Counter(tied), ranks, above=self.zero.persistence_threshold)
        again = (others - kept) + (2 * padded_tied if kept < others else 0)
        gathered = total - others + micro_batches * (others + again)
        yield Message("data", "reduce_scatter", micro_batches * self.weight * total, ranks, "gradients")
        yield Message("data", "all_gather", self.weight * gathered // ranks, ranks, "weights")

    def gradient_bytes(self, parameters: StageParameters, micro_batches: int) -> int:
        """Return the bytes that summing and reducing the gradients of a step's micro-batches moves."""
        elements, later = parameters.num_elements, micro_batches - 1
        if self.uses_bf16_optimizer:
            return elements * (FIRST_SUM_BYTES + NEXT_SUM_BYTES * later)
        # autograd reads both and writes their sum.
        summed = 3 * BYTES[self.training.grad_accum_dtype] * later * elements
        if self.averages_in_place:
            return summed
        if self.zero.stage == 0:
            return summed + FLATTEN_BYTES * elements
        if self.zero.stage == 1:
            return summed + BUCKET_MOVES * self.weight * elements
        return micro_batches * (STAGE_2_MOVES * self.weight + STAGE_2_SHARE_BYTES // self.ranks) * elements

    def optimizer_bytes(self, parameters: StageParameters) -> int:
        """Return the bytes that the optimizer moves in its share of the parameters."""
        ranks = self.ranks if self.zero.stage else 1
        matrices = total_elements(parameters.matrix_group) // ranks
        others = parameters.padded(ranks) // ranks - matrices
        return self.optimizer.bytes_per_element * others + self.optimizer.bytes_per_matrix_element * matrices

    def update_bytes(self, parameters: StageParameters) -> int:
        """Return the bytes that norm, clipping, the optimizer and the copy of its weights move."""
        ranks = self.ranks if self.zero.stage else 1
        each = CLIP_BYTES if self.optimizer.gradient_clipping else 0
        each += STAGE_3_BYTES if self.zero.stage == 3 else NORM_BYTES
        if 0 < self.zero.stage < 3:
            joins = self.training.grad_accum_dtype == self.training.precision  # others are summed in a flat tensor
            each += FLOAT + self.weight + (JOIN_BYTES if joins else 0)
        return each * (parameters.padded(ranks) // ranks) + self.optimizer_bytes(parameters)
