"""How many bytes each axis of parallelism sends in an optimizer step, by collective.

In: a recipe, a layout, a stage's parameters and measured layers. Out: messages of one rank, in the two counts that
tests compare with:

- data-parallel collectives as DeepSpeed's comms logger counts them (comm/comm.py: bytes of the tensor handed in): the
  whole tensor of an all-reduce or reduce-scatter, but of an all-gather the share that a rank contributes;
- tensor-parallel ones as parallel/context.py does: the whole tensor of each (what an all-gather yields).

Data-parallel messages follow from the elements of the parameters, the others were measured (measure.py). `wire_bytes`
is what a rank then sends on a ring of n ranks. Not here: seconds (timing.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ctxlm_ds.planning.layouts import BYTES, Layout, ZeroSettings
from ctxlm_ds.planning.meter import Work
from ctxlm_ds.planning.states import FLOAT, StageParameters, uses_bf16_optimizer
from ctxlm_ds.recipe.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Message:
    """All messages of one kind that a rank takes part in during a step."""

    axis: str
    """`data`, `tensor` or `pipeline`."""
    operation: str
    """`all_reduce`, `all_gather`, `reduce_scatter` or `send`."""
    num_bytes: float
    """As the counters of the module's docstring count."""
    ranks: int
    purpose: str = ""

    @property
    def wire_bytes(self) -> float:
        """Bytes that a rank sends on a ring: 2(n-1)/n of an all-reduce's, (n-1)/n of the whole tensor's otherwise."""
        share = (self.ranks - 1) / self.ranks
        if self.operation == "all_reduce":
            return 2 * share * self.num_bytes
        if self.operation == "all_gather" and self.axis == "data":
            return share * self.ranks * self.num_bytes
        return self.num_bytes if self.operation == "send" else share * self.num_bytes


def data_messages(
    config: RunConfig, layout: Layout, parameters: StageParameters, zero: ZeroSettings, tied: Sequence[int] = ()
) -> list[Message]:
    """List gradients and weights over the data-parallel ranks of one stage.

    `tied`: elements of each parameter that the forward pass uses twice (stage 3 may gather it each time).
    """
    if layout.data == 1:
        return []
    weight, ranks = BYTES[config.training.precision], layout.data
    micro_batches = layout.num_micro_batches(config.training.global_batch_size)
    if zero.stage == 3:
        agreed = Message("data", "all_reduce", _scalars(config, layout, parameters, zero), ranks, "gradient norm")
        return [*_stage3_messages(parameters, zero, ranks, weight, micro_batches, tied), agreed]
    if zero.stage == 0:
        return [Message("data", "all_reduce", FLOAT * parameters.num_elements, ranks, "gradients")]
    gathered = Message("data", "all_gather", weight * parameters.padded(ranks) // ranks, ranks, "weights")
    agreed = Message("data", "all_reduce", _scalars(config, layout, parameters, zero), ranks, "gradient norm")
    if uses_bf16_optimizer(config, zero):
        reduced = weight * parameters.padded(ranks)
    else:
        reduced = weight * parameters.num_elements * (micro_batches if zero.stage == 2 else 1)
    return [Message("data", "all_reduce", reduced, ranks, "gradients"), agreed, gathered]


def _scalars(config: RunConfig, layout: Layout, parameters: StageParameters, zero: ZeroSettings) -> int:
    """Count the bytes with which ranks agree on the gradient norm and on an overflow.

    They do so over the copies of a model, and once more over its parts if it has several.
    """
    split = layout.tensor * layout.pipeline > 1
    if uses_bf16_optimizer(config, zero):
        return FLOAT if split else 0
    norm = FLOAT * len(parameters.groups) * (2 if zero.stage == 3 else 1)
    overflow = 1 if config.training.precision != "fp32" and zero.stage != 3 else 0
    return (norm + overflow) * (2 if split else 1)


def _stage3_messages(
    parameters: StageParameters, zero: ZeroSettings, ranks: int, weight: int, micro_batches: int, tied: Sequence[int]
) -> Iterator[Message]:
    """Gather small (persistent) parameters once after the update, others for each micro-batch.

    Others are gathered once if the backward pass comes before max_reuse_distance elements have gone by, else for every
    use, forward and backward.
    """
    padded = [-(-size // ranks) * ranks for group in parameters.groups for size in group]
    sizes = [size for group in parameters.groups for size in group]
    persistent = sum(p for p, size in zip(padded, sizes, strict=True) if size <= zero.persistence_threshold)
    total = sum(padded)
    others = total - persistent
    # Forward and backward use go by in opposite order: of what lies between them the last half of the distance stays.
    kept = min(others, max(0, zero.max_reuse_distance) / 2 if 2 * total > zero.max_reuse_distance else others)
    padded_tied = sum(-(-size // ranks) * ranks for size in tied if size > zero.persistence_threshold)
    again = (others - kept) + (2 * padded_tied if kept < others else 0)
    gathered = persistent + micro_batches * (others + again)
    yield Message("data", "reduce_scatter", micro_batches * weight * total, ranks, "gradients")
    yield Message("data", "all_gather", weight * gathered // ranks, ranks, "weights")


def tensor_messages(layout: Layout, times: int, layers: Iterable[Work]) -> list[Message]:
    """List what the ranks that share layers send over `times` micro-batches; `layers` of one stage, and the loss."""
    total = [sum(numbers) for numbers in zip(*layers, strict=True)]
    work = Work(*total)
    return [
        Message("tensor", operation, times * getattr(work, operation), layout.tensor)
        for operation in ("all_reduce", "all_gather", "reduce_scatter")
        if getattr(work, operation)
    ]


def pipeline_messages(times: int, with_gradient: float, without_gradient: float) -> list[Message]:
    """List what crosses a cut over `times` micro-batches: tensors onwards, gradients of those that have one back."""
    return [
        Message("pipeline", "send", times * (with_gradient + without_gradient), 2, "tensors"),
        Message("pipeline", "send", times * with_gradient, 2, "gradients"),
    ]


def tied_messages(config: RunConfig, elements: Iterable[int]) -> list[Message]:
    """List the sums of gradients of tied layers, by their elements, that this stage and another one hold."""
    accumulation = BYTES[config.training.grad_accum_dtype]
    return [Message("pipeline", "all_reduce", accumulation * count, 2, "tied layer") for count in elements]
