"""Memory of a GPU, messages of a step, seconds of a step and days of a run for one layout."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain, pairwise
from typing import Any

from ctxlm_ds.apps.plan.layouts import BYTES, Layout
from ctxlm_ds.apps.plan.states import FLOAT, Message, Partition, StageParameters, local_elements, stage_parameters
from ctxlm_ds.apps.plan.timing import StageLayer, StageLoad, StepTime, StepTimer
from ctxlm_ds.models.layers import repeated_layers
from ctxlm_ds.models.meter import CUDA, Platform
from ctxlm_ds.models.stages import blocks_per_stage, layer_parameters, plan_stages
from ctxlm_ds.recipe.hardware import Cluster
from ctxlm_ds.recipe.json_source import load_deepspeed_json
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.zero import ZeroSettings
from ctxlm_ds.training.measure import MeasuredModel, describe, measure, training_flops_per_row, useful_flops_per_row
from ctxlm_ds.training.optimizers.matrix_work import sent_bytes, update_bytes

SECONDS_PER_DAY = 86_400
SENT = {name: ("tensor", name) for name in ("all_reduce", "all_gather", "reduce_scatter")} | {
    f"context_{name}": ("context", name) for name in ("all_to_all", "all_gather", "reduce_scatter")
}
"""Field of Work -> axis and operation of its messages."""
JsonByStage = dict[int, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest GPU."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    """Memory in addition to states and activations at the fuller of two moments, backward pass and update."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True, slots=True)
class Plan:
    """A layout with its memory, messages and time."""

    layout: Layout
    memory: Memory
    messages: tuple[Message, ...]
    """Messages sent in one step by the busiest rank."""
    time: StepTime
    mfu: float
    """Useful operations per second over the GPUs' peak."""
    days: float

    def axis_bytes(self, axis: str) -> float:
        """Return the bytes that a rank sends per step on one axis (on a ring)."""
        return sum(message.wire_bytes for message in self.messages if message.axis == axis)


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One pipeline stage: layers start to stop - 1, and tensor-parallel rank 0's share of their parameters."""

    index: int
    start: int
    stop: int
    is_last: bool
    num_blocks: int
    parameters: StageParameters


def load_jsons(*names: str) -> JsonByStage:
    """Load DeepSpeed JSONs (paths or shipped names) by their ZeRO stage."""
    jsons = map(load_deepspeed_json, names)
    return {ZeroSettings.of_json(settings).stage: settings for settings in jsons}


class Planner:
    """Plans layouts of one recipe on one cluster. Results that several layouts share are computed once."""

    def __init__(
        self, config: RunConfig, cluster: Cluster, jsons: JsonByStage | None = None, platform: Platform = CUDA
    ) -> None:
        """Build the model on `meta`; `jsons` are DeepSpeed's by ZeRO stage, None for the shipped ones (zero0 to zero3).

        Raises ConfigError if the model is impossible, or the size of its vocabulary unknown.
        """
        jsons = jsons or load_jsons("zero0", "zero1", "zero2", "zero3")
        self.config = config
        self.cluster = cluster
        self.platform = platform
        self.model = describe(config, platform=platform)
        self.layers = self.model.layers
        self.zero = {stage: ZeroSettings.of_json(data, config.model.width) for stage, data in jsons.items()}
        self.names = layer_parameters(self.layers, self.model.shapes)
        # Several layouts share these results.
        self._cut, self._stage_layers = cache(self._cut_layers), cache(self._count_layers)
        self._measured = cache(partial(measure, config, platform=platform))

    @cached_property
    def flops(self) -> float:
        """Useful operations of a step over all GPUs, without recomputation.

        Runs whose attention kept all scores computed all pairs of positions, and publications count them.
        """
        rows = self.config.training.global_batch_size
        if self.platform.keeps_scores:
            return training_flops_per_row(self._measured()) * rows
        return useful_flops_per_row(self.config) * rows

    def recipe_of(self, layout: Layout) -> RunConfig:
        """Return the recipe with a layout's settings."""
        config = self.config
        for section, values in layout.values(config.parallel.pipeline_layers).items():
            config = config.with_values(section, **values)
        return config

    def _partition(self, layout: Layout) -> Partition:
        config = self.recipe_of(layout)
        return Partition(config.training, config.optimizer, self.zero[layout.zero_stage], layout.replicas)

    def weigh(self, layout: Layout) -> Plan:
        """Return memory, traffic and time of a layout that recipe/layout.py accepts."""
        partition = self._partition(layout)
        training = partition.training
        loads = [self.load(layout, index) for index in self._telling_stages(layout)]
        time = StepTimer(partition, layout, self.cluster, self.platform.keeps_scores).step(loads)
        busiest = max(loads, key=lambda load: sum(message.wire_bytes for message in load.messages))
        peak = self.cluster.gpu.flops_per_s(training.precision) * layout.world_size
        # A smaller step of a ramp has fewer micro-batches.
        micro_batches_s = time.compute + time.tensor + time.context + time.pipeline
        run_s = time.total * training.max_steps - micro_batches_s * self._missing_steps
        return Plan(
            layout=layout,
            memory=self.memory(layout),
            messages=tuple(busiest.messages),
            time=time,
            mfu=self.flops / (time.total * peak),
            days=run_s / SECONDS_PER_DAY,
        )

    @cached_property
    def _missing_steps(self) -> float:
        """Steps of the full batch whose rows the run does not read because of its ramp."""
        training = self.config.training
        return training.max_steps - training.rows_after(training.max_steps) / training.global_batch_size

    def memory(self, layout: Layout) -> Memory:
        """Return the bytes of the fullest stage's GPU."""
        found = [self._stage_memory(layout, index) for index in self._telling_stages(layout)]
        return max(found, key=lambda memory: memory.total)

    def stages(self, layout: Layout) -> list[Stage]:
        """Cut the layers into the layout's pipeline stages."""
        return self._cut(layout.tensor, layout.pipeline)

    def _cut_layers(self, tensor: int, pipeline: int) -> list[Stage]:
        parallel = self.recipe_of(Layout(1, tensor, pipeline)).parallel
        bounds = [0, len(self.layers)]
        if pipeline > 1:
            bounds = plan_stages(parallel, self.layers, self.model.trained_shapes)
        blocks = blocks_per_stage(self.layers, bounds)
        return [
            Stage(
                index, start, stop, stop == len(self.layers), blocks[index],
                stage_parameters(
                    self.model, chain.from_iterable(self.names[start:stop]), tensor, parallel.vocab_multiple,
                    self.config.optimizer,
                ),
            )
            for index, (start, stop) in enumerate(pairwise(bounds))
        ]  # fmt: skip

    def _telling_stages(self, layout: Layout) -> list[int]:
        """Return first, last, and the first between them with each number of blocks; no other is fuller or slower."""
        stages = self.stages(layout)
        first_of_size: dict[int, int] = {}
        for stage in stages[1:-1]:
            first_of_size.setdefault(stage.num_blocks, stage.index)
        return sorted({0, *first_of_size.values(), len(stages) - 1})

    def _count_layers(self, measured: MeasuredModel, recompute: bool, stage: Stage) -> Counter[StageLayer]:
        """Count the layers of a stage that do the same work, and the loss as one more on the last stage."""
        run = measured.recomputed if recompute else measured.layers
        layers = list(zip(self.layers, measured.layers, run, strict=True))[stage.start : stage.stop]
        repeated = repeated_layers(self.layers[stage.start : stage.stop])
        found = Counter(
            StageLayer(plain, work, recompute and layer.recompute, layer.block, layer.frozen)
            for number, (layer, plain, work) in enumerate(layers)
            if number not in repeated
        )
        return found + Counter({StageLayer(measured.loss, measured.loss, False, False): int(stage.is_last)})

    def load(self, layout: Layout, index: int) -> StageLoad:
        """Collect layers, parameters and messages of pipeline stage `index`."""
        partition, stage, measured = self._partition(layout), self.stages(layout)[index], self._measure(layout)
        layers = self._stage_layers(measured, layout.recompute, stage)
        times = layout.num_micro_batches(partition.training.global_batch_size)
        works = [(layer.run.at(layout.micro_batch_size), count) for layer, count in layers.items()]
        here, everywhere = self._tied(stage.start, stage.stop), self._tied(0, len(self.layers))
        used_twice = [size for key, count in here.items() if count > 1 for size in self._elements(layout, key)]
        messages = partition.messages(layout, stage.parameters, used_twice)
        for name, (axis, operation) in SENT.items():
            if size := times * sum(n * getattr(work, name) for work, n in works):
                messages.append(Message(axis, operation, size, getattr(layout, axis)))
        if moved := sent_bytes(stage.parameters.matrices, layout.zero_stage, layout.replicas, layout.tensor):
            messages.append(Message("data", "send", moved, layout.replicas * layout.tensor, "matrices"))
        if layout.pipeline > 1:
            with_gradient, without_gradient = self._crossing(layout, measured, stage)
            messages.append(Message("pipeline", "send", times * (with_gradient + without_gradient), 2, "tensors"))
            messages.append(Message("pipeline", "send", times * with_gradient, 2, "gradients"))
            each = BYTES[partition.training.grad_accum_dtype]
            for elements in (sum(self._elements(layout, key)) for key in here if here[key] < everywhere[key]):
                messages.append(Message("pipeline", "all_reduce", each * elements, 2, "tied layer"))
        collectives = sum(n * work.collectives for work, n in works)
        exchanges = sum(n * work.context_collectives for work, n in works)
        return StageLoad(layers, collectives, stage.parameters, messages, exchanges)

    def _measure(self, layout: Layout) -> MeasuredModel:
        sizes = {"context": layout.context, "rows": layout.micro_batch_size}
        return self._measured(layout.tensor, layout.sequence_parallel, **sizes)

    def _crossing(self, layout: Layout, measured: MeasuredModel, stage: Stage) -> tuple[float, float]:
        """Return the bytes that cross the cut after a stage (the last: before it), with and without a gradient."""
        cut = stage.start if stage.is_last else stage.stop
        crossing, sizes = measured.flow.before(cut), measured.tensor_bytes[cut]
        rows = layout.micro_batch_size
        with_gradient = sum(rows * sizes[name] for name in crossing.with_gradient)
        return with_gradient, sum(rows * sizes[name] for name in crossing.without_gradient)

    def _tied(self, start: int, stop: int) -> Counter[str]:
        return Counter(layer.tie_key for layer in self.layers[start:stop] if layer.tie_key)

    def _elements(self, layout: Layout, tie_key: str) -> list[int]:
        """Return the elements of each parameter of a tied layer on one rank."""
        number = next(index for index, layer in enumerate(self.layers) if layer.tie_key == tie_key)
        multiple = self.config.parallel.vocab_multiple
        return [local_elements(self.model, name, layout.tensor, multiple) for name in self.names[number]]

    def _stage_memory(self, layout: Layout, index: int) -> Memory:
        partition, stage, teacher = self._partition(layout), self.stages(layout)[index], self.config.teacher
        parameters, training = stage.parameters, partition.training
        elements = partition.state_elements(parameters)
        backward, update = partition.buffer_bytes(parameters)
        if self.platform.device == "cpu" and partition.uses_bf16_optimizer:
            # Bf16Optimizer.waits_for_second
            several = layout.num_micro_batches(training.global_batch_size) > 1
            backward += BYTES["bf16"] * parameters.num_elements * several
        update += partition.workspace_bytes(parameters)
        copies = partition.optimizer.matrix_copies
        update += update_bytes(parameters.matrices, copies, layout.zero_stage, layout.replicas, layout.tensor)
        activations, workspace = self._activations(layout, stage)
        frozen = partition.weight if teacher.precision == "run" else BYTES[teacher.precision]
        return Memory(
            parameters=partition.weight * elements.parameters + frozen * parameters.frozen,
            gradients=BYTES[training.grad_accum_dtype] * elements.gradients,
            optimizer=FLOAT * (elements.master + elements.moments),
            activations=activations,
            buffers=max(workspace + backward, update - activations),
        )

    def _activations(self, layout: Layout, stage: Stage) -> tuple[int, int]:
        """Return the bytes that a stage keeps at the fullest moment, and the temporary workspace.

        1F1B holds one micro-batch for each stage from here on. A stage keeps the activations of its layers, the fields
        of the batch that they read (once), and the tensors that it sends.
        """
        measured, rows = self._measure(layout), layout.micro_batch_size
        layers = self._stage_layers(measured, layout.recompute, stage)
        each = sum(count * layer.run.at(rows).kept for layer, count in layers.items())
        fields = {name for layer in layers for name in layer.run.fields}
        each += rows * sum(measured.field_bytes[name] for name in fields)
        if not stage.is_last:
            each += int(self._crossing(layout, measured, stage)[0])
        held = min(layout.num_micro_batches(self.config.training.global_batch_size), layout.pipeline - stage.index)
        again = max((layer.plain.at(rows).kept for layer in layers if layer.again), default=0)
        return held * each + again, max(layer.plain.at(rows).workspace for layer in layers)
