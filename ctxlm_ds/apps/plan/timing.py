"""Duration of an optimizer step: products, element-wise work, collectives, the pipeline's idle time, the update.

    step = (m + p - 1) x slowest stage's micro-batch + exposed data-parallel communication + update

m micro-batches, p stages. A micro-batch is a forward and a backward pass (backward counts twice; recomputation adds a
forward): products at the GPU's peak x its matrix efficiency x a factor for their sizes, element-wise passes at the
memory's speed, tensor-parallel and context-parallel collectives and stage transfers in full. docs/planning.md explains
the constants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ctxlm_ds.apps.plan.layouts import Layout
from ctxlm_ds.apps.plan.states import FLOAT, Message, Partition, StageParameters
from ctxlm_ds.models.meter import Product
from ctxlm_ds.recipe.hardware import Cluster
from ctxlm_ds.training.measure import BACKWARD_FACTOR, LayerWork

HALF_FILLING_WIDTH = 128
"""Columns of a matrix at which a product reaches half of its best speed: one tile of cuBLAS."""
HALF_FILLING_TOKENS = 256
UNALIGNED_SLOWDOWN = 2.0
"""Time of a product with an unaligned matrix over that of an aligned one: nanoGPT's step took 1.25 times as long with
50,257 words as with 50,304 (Karpathy 2023), and 27 % of it are the product with the words: 1 + 0.25 / 0.27."""
LAUNCH_S_PER_LAYER = 5e-4
"""Least duration of a layer's forward and backward pass: about 60 kernel launches from Python."""
COLLECTIVE_LATENCY_S = 2e-5
COMPILED_SHARE = 0.6
"""Share of the element-wise passes that remains with training.compile (they are fused)."""
SCORE_BYTES = 13
"""Bytes per attention score, forward in 16 bits, if scores are kept (scores, softmax, dropout)."""
PCIE_BYTES_PER_S = 12e9
"""Offload: gradients to the CPU and weights back, third-generation PCIe in practice."""
CPU_UPDATE_BYTES_PER_S = 20e9
"""Offload: a rank's share of its node's memory speed, for the update on the CPU."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step by part."""

    compute: float
    """Products and element-wise work of the slowest stage, all micro-batches."""
    tensor: float
    context: float
    pipeline: float
    """Transfers between stages."""
    bubble: float
    """Idle time of a stage while the pipeline fills and drains."""
    data: float
    """Data-parallel communication that the backward pass does not hide."""
    update: float
    """Sums of gradients, their norm, and the optimizer."""

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.context + self.pipeline + self.bubble + self.data + self.update


class StageLayer(NamedTuple):
    """A layer of a stage, or the loss."""

    plain: LayerWork
    """Its work without recomputation."""
    run: LayerWork
    """Its work in this layout."""
    again: bool
    """True if the backward pass computes it again."""
    repeated: bool
    """True for the repeated layers, which training.compile compiles."""
    frozen: bool = False
    """True for a teacher's layers, which have no backward pass."""


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The work of one stage."""

    layers: Counter[StageLayer]
    collectives: int
    """Tensor-parallel collectives of one micro-batch."""
    parameters: StageParameters
    messages: Sequence[Message]
    context_collectives: int = 0

    def wire_bytes(self, axis: str, word: str = "") -> float:
        """Return the bytes sent on an axis; `word` is an operation or a purpose, or empty for all."""
        return sum(m.wire_bytes for m in self.messages if m.axis == axis and word in ("", m.operation, m.purpose))


@dataclass(frozen=True, slots=True)
class StepTimer:
    """Predicts the seconds of a step of one layout."""

    partition: Partition
    layout: Layout
    cluster: Cluster
    keeps_scores: bool = False
    """True if attention writes its s x s matrices (published runs before FlashAttention)."""

    @property
    def micro_batches(self) -> int:
        return self.layout.num_micro_batches(self.partition.training.global_batch_size)

    def step(self, stages: Sequence[StageLoad]) -> StepTime:
        parts = [self._micro_batch(stage) for stage in stages]
        compute, tensor, context, transfers = max(parts, key=sum)
        return StepTime(
            compute=self.micro_batches * compute,
            tensor=self.micro_batches * tensor,
            context=self.micro_batches * context,
            pipeline=self.micro_batches * transfers,
            bubble=(self.layout.pipeline - 1) * (compute + tensor + context + transfers),
            data=max(self._data(stage, sum(part)) for stage, part in zip(stages, parts, strict=True)),
            update=max(self._update(stage) for stage in stages),
        )

    def _micro_batch(self, stage: StageLoad) -> tuple[float, float, float, float]:
        """Return the seconds of one micro-batch on a stage: computing, collectives of tensors and rows, transfers."""
        compute = sum(count * self._layer(layer) for layer, count in stage.layers.items())
        layout, cluster = self.layout, self.cluster
        tensor_s = context_s = transfer_s = 0.0
        if layout.tensor > 1:
            sent = stage.wire_bytes("tensor") / self.micro_batches
            tensor_s = sent / cluster.ring_bytes_per_s(layout.tensor, 1) + stage.collectives * COLLECTIVE_LATENCY_S
        if layout.context > 1:
            sent = stage.wire_bytes("context") / self.micro_batches
            speed = cluster.pair_bytes_per_s(layout.tensor * layout.context)
            context_s = sent / speed + stage.context_collectives * COLLECTIVE_LATENCY_S
        if layout.pipeline > 1:
            speed = cluster.pair_bytes_per_s(layout.world_size)
            transfer_s = stage.wire_bytes("pipeline", "send") / self.micro_batches / speed + 2 * COLLECTIVE_LATENCY_S
        return compute, tensor_s, context_s, transfer_s

    def _layer(self, layer: StageLayer) -> float:
        """Return the seconds of a layer's forward and backward pass."""
        rows, forwards = self.layout.micro_batch_size, 2 if layer.again else 1
        passes = forwards + (0 if layer.frozen else BACKWARD_FACTOR)
        gpu, training = self.cluster.gpu, self.partition.training
        speed = gpu.flops_per_s(training.precision) * gpu.matrix_efficiency
        products_s = sum(_slowdown(product) * product.computed / speed for product in layer.plain.products(rows))
        work = layer.plain.at(rows)
        moved: float = forwards * work.forward_bytes + work.backward_bytes
        moved *= COMPILED_SHARE if training.compile and layer.repeated else 1.0
        if self.keeps_scores:
            moved += passes * SCORE_BYTES * work.scores
        seconds = passes * products_s + moved / self.cluster.memory_bytes_per_s
        return max(seconds, LAUNCH_S_PER_LAYER * passes / 3 if layer.repeated else 0.0)

    def _data(self, stage: StageLoad, micro_batch_s: float) -> float:
        """Return the seconds of data-parallel communication that nothing hides.

        The backward pass hides gradients if buckets are reduced during it: with overlap_comm in stages 1 to 3 (those of
        one micro-batch in stage 1), but not in a pipeline, with the BF16_Optimizer or in stage 0. Forward and backward
        passes hide stage 3's gathers. Stages 1 and 2 gather after the update.
        """
        layout, zero = self.layout, self.partition.zero
        if layout.replicas == 1:
            return 0.0
        speed = self.cluster.ring_bytes_per_s(layout.replicas, layout.tensor)
        gradients, weights = (stage.wire_bytes("data", purpose) / speed for purpose in ("gradients", "weights"))
        if zero.stage == 3:
            hidden = self.micro_batches * micro_batch_s if zero.overlap_comm else 0.0
            return max(0.0, gradients + weights - hidden) + COLLECTIVE_LATENCY_S
        reduces_late = zero.stage == 0 or self.partition.uses_bf16_optimizer or layout.pipeline > 1
        backward = micro_batch_s * BACKWARD_FACTOR / (1 + BACKWARD_FACTOR + layout.recompute)
        hidden = 0.0 if reduces_late or not zero.overlap_comm else backward
        hidden *= self.micro_batches if zero.stage == 2 else 1
        return max(0.0, gradients - hidden) + weights + 2 * COLLECTIVE_LATENCY_S

    def _update(self, stage: StageLoad) -> float:
        """Return the seconds in which gradients are summed, measured and clipped, and the weights updated.

        An offloaded optimizer takes the seconds of PCIe and of the update in CPU memory.
        """
        parameters, partition, ranks = stage.parameters, self.partition, self.layout.replicas
        summed_s = partition.gradient_bytes(parameters, self.micro_batches) / self.cluster.memory_bytes_per_s
        if partition.zero.offload_optimizer:
            share = parameters.padded(ranks) // ranks
            updated_s = partition.optimizer_bytes(parameters) / CPU_UPDATE_BYTES_PER_S
            return summed_s + share * 2 * FLOAT / PCIE_BYTES_PER_S + updated_s
        updated = partition.update_bytes(parameters)
        return summed_s + updated / self.cluster.memory_bytes_per_s + self._orthogonalize(stage)

    def _orthogonalize(self, stage: StageLoad) -> float:
        """Return the seconds of Muon's iterations, in fp32 and shared out over the ranks, and of its messages."""
        layout, matrices, gpu = self.layout, stage.parameters.matrices, self.cluster.gpu
        if not matrices.elements:
            return 0.0
        speed = gpu.flops_per_s("fp32") * gpu.matrix_efficiency
        sent = stage.wire_bytes("data", "matrices") / self.cluster.ring_bytes_per_s(layout.replicas, layout.tensor)
        return matrices.flops / (layout.replicas * layout.tensor) / speed + sent


def _slowdown(product: Product) -> float:
    """Return the time of a product over that of a large one of aligned matrices."""
    filling = (1 + HALF_FILLING_WIDTH / product.width) * (1 + HALF_FILLING_TOKENS / product.tokens)
    return filling * (1.0 if product.aligned else UNALIGNED_SLOWDOWN)
