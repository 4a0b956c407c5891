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

from ctxlm_ds.data.stream.collate import prediction_slots
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.models.flops import BACKWARD_FACTOR, forward_flops_per_row, training_flops_per_row
from ctxlm_ds.planning.hardware import TERA, Cluster
from ctxlm_ds.planning.layouts import BYTES, Layout, ZeroSettings
from ctxlm_ds.planning.shapes import PlannedLayer, objective_terms, with_vocabulary
from ctxlm_ds.planning.states import FLOAT, StageParameters, state_elements, uses_bf16_optimizer
from ctxlm_ds.planning.traffic import Message
from ctxlm_ds.recipe.schema import RunConfig

HALF_FILLING_WIDTH = 128
"""Columns of a matrix at which a product reaches half of its best speed: one tile of cuBLAS."""
HALF_FILLING_TOKENS = 256
LAUNCH_S_PER_LAYER = 5e-4
"""Least time that a layer's forward and backward pass take, however small it is: about 60 kernels from Python."""
COLLECTIVE_LATENCY_S = 2e-5
NORM_REGION_PASSES = 14
"""Tensors of width h read or written, forward, where tokens may be split: twice dropout (2), sum (3), LayerNorm (2)."""
SPLIT_REGION_PASSES = 4
"""The same of query, key, value and result; the activation adds two of width f."""
COMPILED_SHARE = 0.6
"""Of the element-wise passes, with training.compile (they are fused)."""
SCORE_BYTES = 13
"""Read or written forward for each attention score in 16 bits where scores are kept (scores, softmax, dropout)."""
LOGIT_BYTES = 40
"""Read or written for each logit, forward and backward."""
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

    layers: Sequence[PlannedLayer]
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


def model_flops_per_step(config: RunConfig) -> int:
    """Useful operations of a step over all GPUs (recomputation is none)."""
    model = with_vocabulary(config.model)
    slots, sequences = prediction_slots(config.data, config.objective), config.data.sequences_per_row
    per_row = training_flops_per_row(model, objective_terms(config), config.data.seq_length, slots, sequences)
    return per_row * config.training.global_batch_size


def peak_flops(config: RunConfig, cluster: Cluster) -> float:
    """Of one GPU, in the recipe's precision, operations a second."""
    gpu = cluster.gpu
    return TERA * (gpu.tflops_fp32 if config.training.precision == "fp32" else gpu.tflops_16bit)


def block_flops_per_row(config: RunConfig) -> int:
    """One layer's forward products of one row."""
    model = with_vocabulary(config.model)
    return _forward(config, _with_layers(model, 2)) - _forward(config, _with_layers(model, 1))


def head_flops_per_row(config: RunConfig) -> int:
    """Forward products of one row after the last layer."""
    model = _with_layers(with_vocabulary(config.model), 1)
    return _forward(config, model) - block_flops_per_row(config)


def _with_layers(model: TransformerSection, count: int) -> TransformerSection:
    return model.model_copy(update={"num_layers": count})


def _forward(config: RunConfig, model: TransformerSection) -> int:
    slots, sequences = prediction_slots(config.data, config.objective), config.data.sequences_per_row
    return forward_flops_per_row(model, objective_terms(config), config.data.seq_length, slots, sequences)


def _micro_batch(
    config: RunConfig, layout: Layout, cluster: Cluster, stage: StageLoad, keeps_scores: bool
) -> tuple[float, float, float]:
    """Seconds of one micro-batch on a stage: computing, tensor-parallel collectives, transfers."""
    num_blocks = sum(layer.block for layer in stage.layers)
    compute = num_blocks * _block_time(config, layout, cluster, keeps_scores)
    if not stage.layers[-1].block:
        compute += _head_time(config, layout, cluster)
    micro_batches = layout.num_micro_batches(config.training.global_batch_size)
    tensor = sum(m.wire_bytes for m in stage.messages if m.axis == "tensor") / micro_batches
    tensor_s = tensor / cluster.ring_bytes_per_s(layout.tensor, 1) if layout.tensor > 1 else 0.0
    if layout.tensor > 1:
        tensor_s += num_blocks * (6 if layout.recompute else 4) * COLLECTIVE_LATENCY_S
    sent = sum(m.wire_bytes for m in stage.messages if m.axis == "pipeline" and m.operation == "send") / micro_batches
    transfer_s = 0.0
    if layout.pipeline > 1:
        transfer_s = sent / _stage_link(layout, cluster) + 2 * COLLECTIVE_LATENCY_S
    return compute, tensor_s, transfer_s


def _stage_link(layout: Layout, cluster: Cluster) -> float:
    """Speed between neighbouring stages, which lie tensor x data ranks apart."""
    if layout.tensor * layout.data * layout.pipeline <= cluster.gpus_per_node:
        return cluster.nvlink_bytes_per_s
    return min(cluster.nvlink_bytes_per_s, cluster.node_bytes_per_s / cluster.gpus_per_node)


def _passes(layout: Layout) -> int:
    return 1 + BACKWARD_FACTOR + (1 if layout.recompute else 0)


def _product_speed(config: RunConfig, layout: Layout, cluster: Cluster, tokens: int) -> float:
    width = config.model.hidden_size / layout.tensor
    filled = width / (width + HALF_FILLING_WIDTH) * tokens / (tokens + HALF_FILLING_TOKENS)
    return peak_flops(config, cluster) * cluster.gpu.matrix_efficiency * filled


def _block_time(config: RunConfig, layout: Layout, cluster: Cluster, keeps_scores: bool) -> float:
    model, rows, passes = config.model, layout.micro_batch_size, _passes(layout)
    tokens, word_bytes = rows * config.data.seq_length, BYTES[config.training.precision]
    products = passes * rows * block_flops_per_row(config) / layout.tensor
    products_s = products / _product_speed(config, layout, cluster, tokens)
    moved = NORM_REGION_PASSES * model.hidden_size / layout.token_split
    moved += (SPLIT_REGION_PASSES * model.hidden_size + 2 * model.intermediate_size) / layout.tensor
    moved *= tokens * word_bytes * (COMPILED_SHARE if config.training.compile else 1.0)
    if keeps_scores:
        moved += SCORE_BYTES * model.num_attention_heads * tokens * config.data.seq_length / layout.tensor
    return max(products_s + passes * moved / cluster.memory_bytes_per_s, LAUNCH_S_PER_LAYER * passes / 3)


def _head_time(config: RunConfig, layout: Layout, cluster: Cluster) -> float:
    """From the last layer to the loss and back; it is never computed again."""
    rows = layout.micro_batch_size
    vocabulary = with_vocabulary(config.model).vocab_size or 0
    labels = rows * prediction_slots(config.data, config.objective)
    products = (1 + BACKWARD_FACTOR) * rows * head_flops_per_row(config) / layout.tensor
    logits = LOGIT_BYTES * labels * vocabulary / layout.tensor
    return products / _product_speed(config, layout, cluster, labels) + logits / cluster.memory_bytes_per_s


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
    backward = 0.0 if plain else sum(micro_batch) * BACKWARD_FACTOR / _passes(layout)
    if zero.stage == 3:
        hidden = times * sum(micro_batch) * (1.0 if zero.overlap_comm else 0.0)
        return max(0.0, seconds["gradients"] + seconds["weights"] - hidden) + COLLECTIVE_LATENCY_S
    covered = backward * (times if zero.stage == 2 else 1)
    return max(0.0, seconds["gradients"] - covered) + seconds["weights"] + 2 * COLLECTIVE_LATENCY_S


def _update_time(
    config: RunConfig, layout: Layout, zero: ZeroSettings, cluster: Cluster, stage: StageLoad
) -> float:
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
