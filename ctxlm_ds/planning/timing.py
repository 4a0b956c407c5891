"""How long an optimizer step takes: products, element-wise work, collectives, the pipeline's idle time, the update.

In: a recipe, a layout, a cluster, each stage's layers and messages. Out: seconds by part. Not here: memory (memory.py).

    step = (m + p - 1) x slowest stage's micro-batch + exposed data-parallel communication + update

m micro-batches, p stages. A micro-batch is forward and backward (backward counts twice; recomputation adds a forward):
products at the GPU's peak x its matrix efficiency x how well their sizes fill it, element-wise passes at the memory's
speed, tensor-parallel collectives and stage transfers in full (nothing of them is counted as hidden). The constants and
what they rest on are in docs/planning.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ctxlm_ds.planning.hardware import TERA, Cluster
from ctxlm_ds.planning.layouts import Layout, ZeroSettings
from ctxlm_ds.planning.measure import BACKWARD_FACTOR, LayerWork
from ctxlm_ds.planning.states import FLOAT, StageParameters, state_elements, uses_bf16_optimizer
from ctxlm_ds.planning.traffic import Message
from ctxlm_ds.recipe.schema import RunConfig

HALF_FILLING_WIDTH = 128
"""Columns of a matrix at which a product reaches half of its best speed: one tile of cuBLAS."""
HALF_FILLING_TOKENS = 256
LAUNCH_S_PER_LAYER = 5e-4
"""Least time that a layer's forward and backward pass take, however small it is: about 60 kernels from Python."""
COLLECTIVE_LATENCY_S = 2e-5
COMPILED_SHARE = 0.6
"""Of the element-wise passes, with training.compile (they are fused)."""
SCORE_BYTES = 13
"""Read or written forward for each attention score in 16 bits if scores are kept (scores, softmax, dropout)."""
UPDATE_BYTES = 30
"""An element of the optimizer's share: weight, two moments and gradient read, three written, 16-bit weight too."""
PCIE_BYTES_PER_S = 12e9
"""Offload: gradients to the CPU and weights back, third-generation PCIe as it is reached."""
CPU_UPDATE_BYTES_PER_S = 20e9
"""Offload: a rank's share of its node's memory speed, for the update on the CPU."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step by part."""

    compute: float
    """Products and element-wise work of the slowest stage, all micro-batches."""
    tensor: float
    pipeline: float
    """Transfers between stages."""
    bubble: float
    """What a stage waits while the pipeline fills and drains."""
    data: float
    """Data-parallel communication that the backward pass does not cover."""
    update: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + self.tensor + self.pipeline + self.bubble + self.data + self.update


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What the timing needs of one stage."""

    layers: Sequence[LayerWork]
    """Its layers as measured without recomputation, and the loss on the last stage."""
    recomputed: Sequence[bool]
    """Whether the backward pass computes each of them again."""
    compiled: Sequence[bool]
    """Whether training.compile compiles each of them: the repeated layers."""
    collectives: int
    """Tensor-parallel collectives of one micro-batch."""
    parameters: StageParameters
    messages: Sequence[Message]


def step_time(
    config: RunConfig,
    layout: Layout,
    zero: ZeroSettings,
    cluster: Cluster,
    stages: Sequence[StageLoad],
    keeps_scores: bool = False,
) -> StepTime:
    """Seconds of a step; `keeps_scores`: attention writes its s x s matrices (published runs before FlashAttention)."""
    micro_batches = layout.num_micro_batches(config.training.global_batch_size)
    parts = [_micro_batch(config, layout, cluster, stage, keeps_scores) for stage in stages]
    compute, tensor, transfers = max(parts, key=sum)
    slowest = compute + tensor + transfers
    data = max(_data_time(config, layout, zero, cluster, stage, parts[i]) for i, stage in enumerate(stages))
    return StepTime(
        compute=micro_batches * compute,
        tensor=micro_batches * tensor,
        pipeline=micro_batches * transfers,
        bubble=(layout.pipeline - 1) * slowest,
        data=data,
        update=max(_update_time(config, layout, zero, cluster, stage) for stage in stages),
    )


def peak_flops(config: RunConfig, cluster: Cluster) -> float:
    """Of one GPU, in the recipe's precision, operations a second."""
    gpu = cluster.gpu
    return TERA * (gpu.tflops_fp32 if config.training.precision == "fp32" else gpu.tflops_16bit)


def _micro_batch(
    config: RunConfig, layout: Layout, cluster: Cluster, stage: StageLoad, keeps_scores: bool
) -> tuple[float, float, float]:
    """Return the seconds of one micro-batch on a stage: computing, tensor-parallel collectives, transfers."""
    compute = sum(
        _layer_time(config, layout, cluster, layer, again, compiled, keeps_scores)
        for layer, again, compiled in zip(stage.layers, stage.recomputed, stage.compiled, strict=True)
    )
    micro_batches = layout.num_micro_batches(config.training.global_batch_size)
    tensor_s = transfer_s = 0.0
    if layout.tensor > 1:
        sent = sum(m.wire_bytes for m in stage.messages if m.axis == "tensor") / micro_batches
        tensor_s = sent / cluster.ring_bytes_per_s(layout.tensor, 1) + stage.collectives * COLLECTIVE_LATENCY_S
    if layout.pipeline > 1:
        sends = (m.wire_bytes for m in stage.messages if m.axis == "pipeline" and m.operation == "send")
        transfer_s = sum(sends) / micro_batches / _stage_link(layout, cluster) + 2 * COLLECTIVE_LATENCY_S
    return compute, tensor_s, transfer_s


def _stage_link(layout: Layout, cluster: Cluster) -> float:
    """Speed between neighbouring stages, which lie tensor x data ranks apart."""
    if layout.tensor * layout.data * layout.pipeline <= cluster.gpus_per_node:
        return cluster.nvlink_bytes_per_s
    return min(cluster.nvlink_bytes_per_s, cluster.node_bytes_per_s / cluster.gpus_per_node)


def _layer_time(
    config: RunConfig,
    layout: Layout,
    cluster: Cluster,
    layer: LayerWork,
    again: bool,
    compiled: bool,
    keeps_scores: bool,
) -> float:
    """Return the seconds of a layer's forward and backward pass."""
    rows, forwards = layout.micro_batch_size, 2 if again else 1
    speed = peak_flops(config, cluster) * cluster.gpu.matrix_efficiency
    products_s = sum(
        flops / speed * (1 + HALF_FILLING_WIDTH / width) * (1 + HALF_FILLING_TOKENS / tokens)
        for flops, tokens, width in layer.products(rows)
    )
    work = layer.at(rows)
    moved: float = forwards * work.forward_bytes + work.backward_bytes
    moved *= COMPILED_SHARE if config.training.compile and compiled else 1.0
    if keeps_scores:
        moved += (forwards + BACKWARD_FACTOR) * SCORE_BYTES * work.scores
    seconds = (forwards + BACKWARD_FACTOR) * products_s + moved / cluster.memory_bytes_per_s
    return max(seconds, LAUNCH_S_PER_LAYER * (forwards + BACKWARD_FACTOR) / 3 if compiled else 0.0)


def _data_time(
    config: RunConfig,
    layout: Layout,
    zero: ZeroSettings,
    cluster: Cluster,
    stage: StageLoad,
    micro_batch: tuple[float, float, float],
) -> float:
    """Gradients hide behind the backward pass where buckets are reduced during it: with overlap_comm in stages 1 to 3,
    one micro-batch's (stages 2 and 3: every one's), but not in a pipeline nor with the BF16_Optimizer or stage 0.
    Stage 3's gathers hide behind forward and backward passes; stages 1 and 2 gather after the update.
    """
    if layout.data == 1:
        return 0.0
    speed = cluster.ring_bytes_per_s(layout.data, layout.tensor)
    seconds = {
        purpose: sum(m.wire_bytes for m in stage.messages if m.axis == "data" and m.purpose == purpose) / speed
        for purpose in ("gradients", "weights")
    }
    times = layout.num_micro_batches(config.training.global_batch_size)
    plain = zero.stage == 0 or uses_bf16_optimizer(config, zero) or layout.pipeline > 1 or not zero.overlap_comm
    backward = 0.0 if plain else sum(micro_batch) * BACKWARD_FACTOR / (1 + BACKWARD_FACTOR + layout.recompute)
    if zero.stage == 3:
        hidden = times * sum(micro_batch) * (1.0 if zero.overlap_comm else 0.0)
        return max(0.0, seconds["gradients"] + seconds["weights"] - hidden) + COLLECTIVE_LATENCY_S
    covered = backward * (times if zero.stage == 2 else 1)
    return max(0.0, seconds["gradients"] - covered) + seconds["weights"] + 2 * COLLECTIVE_LATENCY_S


def _update_time(config: RunConfig, layout: Layout, zero: ZeroSettings, cluster: Cluster, stage: StageLoad) -> float:
    """The optimizer's reading and writing, and that of the gradients for their norm and to clear them; offloaded, the
    way over PCIe and the update in CPU memory.
    """
    elements = state_elements(config, stage.parameters, zero, layout.data)
    if zero.offload_optimizer:
        share = stage.parameters.padded(layout.data) // layout.data
        return share * (2 * FLOAT / PCIE_BYTES_PER_S + UPDATE_BYTES / CPU_UPDATE_BYTES_PER_S)
    share = max(elements.master, elements.moments // 2)
    moved = UPDATE_BYTES * share + 3 * FLOAT * elements.gradients
    return moved / cluster.memory_bytes_per_s
