"""One layout weighed: memory of a GPU, messages of a step, seconds of a step, days of a run.

In: a recipe, a cluster, a layout, DeepSpeed's JSON of its ZeRO stage. Out: Plan. Not here: which layouts to weigh
(search.py), how they are shown (report.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ctxlm_ds.models.stages import block_costs, bounds_of_counts, stage_bounds
from ctxlm_ds.planning.activations import CUDA, Platform, activation_bytes
from ctxlm_ds.planning.hardware import Cluster
from ctxlm_ds.planning.layouts import Layout, ZeroSettings
from ctxlm_ds.planning.shapes import WORD_EMBEDDINGS, PlannedLayer, layer_list
from ctxlm_ds.planning.states import StageParameters, buffer_bytes, local_elements, stage_parameters, state_bytes
from ctxlm_ds.planning.timing import StageLoad, StepTime, model_flops_per_step, peak_flops, step_time
from ctxlm_ds.planning.traffic import Message, data_messages, pipeline_messages, tensor_messages, tied_message
from ctxlm_ds.recipe.schema import RunConfig

SECONDS_PER_DAY = 86_400
JsonByStage = dict[int, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest GPU."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    """What the fuller of the two moments (backward pass, update) needs beside states and activations."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True, slots=True)
class Plan:
    """A layout and what it needs."""

    layout: Layout
    memory: Memory
    messages: tuple[Message, ...]
    """Of the rank that moves most."""
    time: StepTime
    mfu: float
    """Useful operations a second over the GPUs' peak."""
    days: float

    def axis_bytes(self, axis: str) -> float:
        """Bytes that a rank sends on one axis in a step (on a ring)."""
        return sum(message.wire_bytes for message in self.messages if message.axis == axis)


class Planner:
    """Weighs layouts of one recipe on one cluster; what several layouts share is computed once."""

    def __init__(
        self, config: RunConfig, cluster: Cluster, jsons: JsonByStage, platform: Platform = CUDA
    ) -> None:
        """`jsons`: DeepSpeed's JSON by ZeRO stage."""
        self.config = config
        self.cluster = cluster
        self.platform = platform
        self.layers = layer_list(config)
        self.zero = {stage: ZeroSettings.of_json(data, config.model.hidden_size) for stage, data in jsons.items()}
        self.flops = model_flops_per_step(config)
        self._stages: dict[tuple[int, int], list[tuple[Sequence[PlannedLayer], StageParameters]]] = {}

    def weigh(self, layout: Layout) -> Plan:
        """Memory, traffic and time of a possible layout (recipe/layout.py has no problem with it)."""
        config, zero = layout.apply(self.config), self.zero[layout.zero_stage]
        loads = [self.load(layout, index) for index in self._telling_stages(layout)]
        time = step_time(config, layout, zero, self.cluster, loads, self.platform.keeps_scores)
        busiest = max(loads, key=lambda load: sum(message.wire_bytes for message in load.messages))
        peak = peak_flops(config, self.cluster) * layout.world_size
        return Plan(
            layout=layout,
            memory=self.memory(layout),
            messages=tuple(busiest.messages),
            time=time,
            mfu=self.flops / (time.total * peak),
            days=time.total * config.training.max_steps / SECONDS_PER_DAY,
        )

    def memory(self, layout: Layout) -> Memory:
        """Bytes of the fullest stage's GPU."""
        config = layout.apply(self.config)
        return max((self._stage_memory(config, layout, i) for i in self._telling_stages(layout)), key=_total)

    def stages(self, layout: Layout) -> list[tuple[Sequence[PlannedLayer], StageParameters]]:
        """Layers of each pipeline stage and what tensor-parallel rank 0 holds of their parameters."""
        key = (layout.tensor, layout.pipeline)
        if key not in self._stages:
            bounds = self._bounds(layout)
            cut = [self.layers[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
            multiple = self.config.parallel.vocab_multiple
            self._stages[key] = [(part, stage_parameters(part, layout.tensor, multiple)) for part in cut]
        return self._stages[key]

    def _bounds(self, layout: Layout) -> list[int]:
        """As training/stage_plan.py cuts; what it would measure (`time`) is taken as even."""
        parallel = layout.apply(self.config).parallel
        if layout.pipeline == 1:
            return [0, len(self.layers)]
        if parallel.pipeline_layers is not None:
            return bounds_of_counts(self.layers, parallel.pipeline_layers)
        by_parameters = parallel.pipeline_partition == "parameters"
        costs = [float(layer.num_elements) for layer in self.layers] if by_parameters else block_costs(self.layers)
        return stage_bounds(self.layers, costs, layout.pipeline)

    def _telling_stages(self, layout: Layout) -> list[int]:
        """First, last, and of those between the first with each number of layers: no other is fuller or slower."""
        stages = self.stages(layout)
        first_of_size: dict[int, int] = {}
        for index, (layers, _) in enumerate(stages[1:-1], start=1):
            first_of_size.setdefault(sum(layer.block for layer in layers), index)
        return sorted({0, *first_of_size.values(), len(stages) - 1})

    def load(self, layout: Layout, index: int) -> StageLoad:
        """Layers, parameters and messages of pipeline stage `index`."""
        config = layout.apply(self.config)
        layers, parameters = self.stages(layout)[index]
        zero, table = self.zero[layout.zero_stage], self._table_elements(layout)
        messages = [
            *data_messages(config, layout, parameters, zero, table if layout.pipeline == 1 else 0),
            *tensor_messages(config, layout, layers),
            *pipeline_messages(config, layout),
        ]
        if index in (0, layout.pipeline - 1):
            messages += tied_message(config, layout, table)
        return StageLoad(layers, parameters, messages)

    def _table_elements(self, layout: Layout) -> int:
        name, shape = next(item for layer in self.layers if layer.name == WORD_EMBEDDINGS for item in layer.shapes)
        return local_elements(name, shape, layout.tensor, self.config.parallel.vocab_multiple)

    def _stage_memory(self, config: RunConfig, layout: Layout, index: int) -> Memory:
        layers, parameters = self.stages(layout)[index]
        zero = self.zero[layout.zero_stage]
        states = state_bytes(config, parameters, zero, layout.data)
        buffers = buffer_bytes(config, parameters, zero, layout.data)
        activations, workspace = self._activations(config, layout, layers, index)
        peak = max(activations + workspace + buffers.backward, buffers.update)
        return Memory(
            states.parameters, states.gradients, states.optimizer, activations, peak - activations
        )

    def _activations(
        self, config: RunConfig, layout: Layout, layers: Iterable[PlannedLayer], index: int
    ) -> tuple[int, int]:
        """Kept at the fullest moment by stage `index`, and the passing workspace: 1F1B holds one micro-batch for each
        stage from here on.
        """
        sizes = activation_bytes(config, layout, self.platform)
        held = min(layout.num_micro_batches(config.training.global_batch_size), layout.pipeline - index)
        num_blocks = sum(layer.block for layer in layers)
        is_last = index == layout.pipeline - 1
        each = num_blocks * (sizes.layer_input if layout.recompute else sizes.layer)
        each += sizes.embeddings if index == 0 else 0
        each += sizes.heads if is_last else sizes.hidden
        return held * each + (sizes.layer if layout.recompute else 0), sizes.workspace


def _total(memory: Memory) -> int:
    return memory.total
