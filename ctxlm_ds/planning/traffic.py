"""How many bytes each axis of parallelism sends in an optimizer step, by collective.

In: a recipe, a layout, a stage's parameters. Out: messages of one rank, in the two counts that tests compare with:

- data-parallel collectives as DeepSpeed's comms logger counts them (comm/comm.py: bytes of the tensor handed in): the
  whole tensor of an all-reduce or reduce-scatter, but of an all-gather the share that a rank contributes;
- tensor-parallel ones as parallel/traffic.py does: the whole tensor of each (what an all-gather yields).

`wire_bytes` is what a rank then sends on a ring. Not here: seconds (timing.py).
Shape letters: T = b·s tokens of a micro-batch, h width, w bytes of an element, n ranks of a collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ctxlm_ds.data.stream.collate import prediction_slots
from ctxlm_ds.planning.layouts import BYTES, Layout, ZeroSettings
from ctxlm_ds.planning.shapes import WORD_EMBEDDINGS, PlannedLayer
from ctxlm_ds.planning.states import FLOAT, StageParameters, uses_bf16_optimizer
from ctxlm_ds.recipe.schema import RunConfig

INDEX = 8


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
    config: RunConfig, layout: Layout, parameters: StageParameters, zero: ZeroSettings, tied: int = 0
) -> list[Message]:
    """Gradients and weights over the data-parallel ranks of one stage.

    `tied`: elements of the table that the forward pass uses twice (stage 3 may gather it each time).
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
    """Bytes with which ranks agree on the gradient norm and on an overflow: over the copies of a model, and once more
    over its parts where it has several.
    """
    split = layout.tensor * layout.pipeline > 1
    if uses_bf16_optimizer(config, zero):
        return FLOAT if split else 0
    norm = FLOAT * len(parameters.groups) * (2 if zero.stage == 3 else 1)
    overflow = 1 if config.training.precision != "fp32" and zero.stage != 3 else 0
    return (norm + overflow) * (2 if split else 1)


def _stage3_messages(
    parameters: StageParameters, zero: ZeroSettings, ranks: int, weight: int, micro_batches: int, tied: int
) -> Iterator[Message]:
    """Small (persistent) parameters are gathered once after the update, others for each micro-batch: once where the
    backward pass comes before max_reuse_distance elements have gone by, else for every use, forward and backward.
    """
    padded = [-(-size // ranks) * ranks for group in parameters.groups for size in group]
    sizes = [size for group in parameters.groups for size in group]
    persistent = sum(p for p, size in zip(padded, sizes, strict=True) if size <= zero.persistence_threshold)
    total = sum(padded)
    others = total - persistent
    # Forward and backward use go by in opposite order: of what lies between them the last half of the distance stays.
    kept = min(others, max(0, zero.max_reuse_distance) / 2 if 2 * total > zero.max_reuse_distance else others)
    padded_tied = -(-tied // ranks) * ranks if tied > zero.persistence_threshold else 0
    again = (others - kept) + (2 * padded_tied if kept < others else 0)
    gathered = persistent + micro_batches * (others + again)
    yield Message("data", "reduce_scatter", micro_batches * weight * total, ranks, "gradients")
    yield Message("data", "all_gather", weight * gathered // ranks, ranks, "weights")


def tensor_messages(config: RunConfig, layout: Layout, layers: Sequence[PlannedLayer]) -> list[Message]:
    """What ranks that share layers send, over all micro-batches of a step; `layers` of one stage, in order."""
    if layout.tensor == 1:
        return []
    totals: dict[str, float] = {}
    times = layout.num_micro_batches(config.training.global_batch_size)
    blocks = [layer for layer in layers if layer.block]
    counted = [(layer, index > 0, 1) for index, layer in enumerate(layers) if not layer.block]
    counted += [(blocks[0], False, len(blocks))] if blocks else []
    for layer, is_decode, count in counted:
        for operation, num_bytes in _of_layer(config, layout, layer, is_decode):
            totals[operation] = totals.get(operation, 0) + count * times * num_bytes
    return [Message("tensor", operation, count, layout.tensor) for operation, count in totals.items()]


def _of_layer(config: RunConfig, layout: Layout, layer: PlannedLayer, is_decode: bool) -> Iterator[tuple[str, int]]:
    if layer.name == WORD_EMBEDDINGS:
        yield from _decode(config, layout) if is_decode else _look_up(config, layout)
    elif layer.block:
        yield from _block(config, layout)
    elif layer.name == "heads" and layout.sequence_parallel:
        yield "all_gather", _hidden_bytes(config, layout)
    if layout.sequence_parallel:
        yield "all_reduce", _shared_gradients(config, layer)


def _hidden_bytes(config: RunConfig, layout: Layout) -> int:
    tokens = layout.micro_batch_size * config.data.seq_length
    return tokens * config.model.hidden_size * BYTES[config.training.precision]


def _block(config: RunConfig, layout: Layout) -> Iterator[tuple[str, int]]:
    """Two matrices split by columns, each followed by one split by rows; recomputation runs forward once more."""
    hidden, forward = _hidden_bytes(config, layout), 2 if layout.recompute else 1
    if not layout.sequence_parallel:
        yield "all_reduce", 2 * hidden * forward + 2 * hidden
        return
    # Forward gathers before and reduces after; backward does so with the gradients, and gathers the input again.
    yield "all_gather", 2 * hidden * forward + 4 * hidden
    yield "reduce_scatter", 2 * hidden * forward + 2 * hidden


def _look_up(config: RunConfig, layout: Layout) -> Iterator[tuple[str, int]]:
    hidden = _hidden_bytes(config, layout)
    if not layout.sequence_parallel:
        yield "all_reduce", hidden
        return
    yield "reduce_scatter", hidden
    yield "all_gather", hidden


def _decode(config: RunConfig, layout: Layout) -> Iterator[tuple[str, int]]:
    """Gradient of the decoded vectors; five small all-reduces of the vocabulary-parallel loss and its accuracy."""
    labels = layout.micro_batch_size * prediction_slots(config.data, config.objective)
    vectors = labels * config.model.hidden_size * BYTES[config.training.precision]
    if config.model.is_decoder and layout.sequence_parallel:
        yield "all_gather", 2 * vectors
        yield "reduce_scatter", vectors
    else:
        yield "all_reduce", vectors
    yield "all_reduce", labels * (3 * FLOAT + FLOAT + INDEX)


def _shared_gradients(config: RunConfig, layer: PlannedLayer) -> int:
    """Gradients of the parameters that every rank holds and uses for its own tokens only (not those of the heads)."""
    if layer.name in ("heads", WORD_EMBEDDINGS, "mlm_bias"):
        return 0
    if not layer.block:
        elements = layer.num_elements
    else:
        shared = ("_layer_norm.weight", "_layer_norm.bias", "output.bias", "down.bias")
        elements = sum(shape[0] for name, shape in layer.shapes if name.endswith(shared))
    return elements * BYTES[config.training.precision]


def pipeline_messages(config: RunConfig, layout: Layout) -> list[Message]:
    """What a stage in the middle sends on and back over all micro-batches of a step."""
    if layout.pipeline == 1:
        return []
    rows, data = layout.micro_batch_size, config.data
    hidden = _hidden_bytes(config, layout) // layout.token_split
    columns = data.seq_length + data.sequences_per_row + 1
    if not config.model.is_decoder:
        columns += prediction_slots(data, config.objective) + data.sequences_per_row
    times = layout.num_micro_batches(config.training.global_batch_size)
    return [
        Message("pipeline", "send", times * (hidden + INDEX * rows * columns), 2, "hidden states and row bounds"),
        Message("pipeline", "send", times * hidden, 2, "gradients"),
    ]


def tied_message(config: RunConfig, layout: Layout, table_elements: int) -> list[Message]:
    """First and last stage add up the gradients of the table that both hold."""
    if layout.pipeline == 1:
        return []
    accumulation = BYTES[config.training.grad_accum_dtype]
    return [Message("pipeline", "all_reduce", accumulation * table_elements, 2, "tied embedding")]
