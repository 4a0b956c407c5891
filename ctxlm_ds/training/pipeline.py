"""The layer list as DeepSpeed's pipeline: its stages, and a step's passes through them.

In: layer descriptions and where to cut them; a rank's micro-batches. Out: the objective's sums on the last stage,
gradients inside the engine. DeepSpeed's schedule (1F1B) and its transfers are used as they are; the optimizer's step is
taken out of the schedule, so that the engine's gate stands before it as in every other layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.models.layer_list import LayerDescription, Tensors, run_layer
from ctxlm_ds.parallel.random import DropoutStreams
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.training.figures import add_into
from ctxlm_ds.training.passes import PassSettings, Sums, model_inputs
from ctxlm_ds.training.runtime import pipeline_topology


class _Spec(LayerSpec):
    """DeepSpeed's specification of a layer that occurs once."""

    def __init__(self, description: LayerDescription) -> None:
        super().__init__(nn.Module)
        self.description = description

    def build(self, log: bool = False) -> nn.Module:
        return self.description.build()


class _TiedSpec(TiedLayerSpec):
    """DeepSpeed's specification of a layer whose weight several stages hold and keep equal."""

    def __init__(self, description: LayerDescription) -> None:
        super().__init__(description.tie_key, nn.Module, tied_weight_attr=["weight"])
        self.description = description

    def build(self, log: bool = False) -> nn.Module:
        return self.description.build()


class PipelineStage(PipelineModule):
    """This rank's stage of the list; runs its layers exactly as LayerSequence does."""

    def __init__(
        self,
        descriptions: Sequence[LayerDescription],
        bounds: Sequence[int],
        topology: Topology,
        streams: DropoutStreams,
    ) -> None:
        """`bounds`: first layer of each stage, and the number of layers (models/stages.py)."""
        self._bounds = list(bounds)
        self._streams = streams
        specs = [_TiedSpec(d) if d.tie_key else _Spec(d) for d in descriptions]
        super().__init__(specs, topology=pipeline_topology(topology), loss_fn=_not_yet, partition_method="bounds")
        self._steps: list[tuple[int, LayerDescription, nn.Module]] = []
        for index in range(self._local_start, self._local_stop):
            description = descriptions[index]
            module = self.tied_modules[description.tie_key] if description.tie_key else getattr(self, str(index))
            self._steps.append((index, description, module))

    def _partition_layers(self, method: str = "bounds") -> None:
        self.parts = self._bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self._bounds[stage], stop=self._bounds[stage + 1])

    def forward(self, inputs: Tensors) -> Tensors:
        """The previous stage's tensors -> the next one's (the first: Batch.model_inputs(); the last: logits)."""
        for index, description, module in self._steps:
            inputs = run_layer(description, module, inputs, index, self._streams)
        return inputs

    def full_named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This stage's parameters under their full names, each once."""
        named: dict[str, nn.Parameter] = {}
        for _, description, module in self._steps:
            for name, parameter in module.named_parameters():
                named.setdefault(f"{description.name}.{name}", parameter)
        return list(named.items())


class PipelinePasses:
    """Passes through DeepSpeed's PipelineEngine; the sums are the last stage's, empty on the others."""

    def __init__(self, engine: PipelineEngine, settings: PassSettings) -> None:
        self._deepspeed = engine
        self._settings = settings
        self._sums: Sums = {}
        self._forward_index = 0
        self._step_index = 0
        engine.module.loss_fn = self._loss
        engine._INSTRUCTION_MAP = {
            **engine._INSTRUCTION_MAP,
            schedule.ForwardPass: self._seeded_forward_pass(),
            schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
            schedule.OptimizerStep: _wait_for_update,
        }

    def train(self, step: Step, step_index: int, factors: torch.Tensor) -> Sums:
        """Gradients of all micro-batches, reduced; the last stage's sums."""
        self._begin(step_index)
        self._deepspeed.train_batch(self._feed(step.micro_batches, factors))
        if self._deepspeed.steps_per_print() is None:
            # Nobody reads it, and it would keep two events of every step.
            self._deepspeed.timers(TRAIN_BATCH_TIMER).reset()
        return self._sums

    def update(self) -> None:
        """Apply the gradients."""
        PipelineEngine._exec_optimizer_step(self._deepspeed)

    def evaluate(self, batches: Iterable[Batch | None], factors: torch.Tensor) -> Sums:
        """The last stage's sums over this rank's batches, of the training's shape, in evaluation mode."""
        listed = list(batches)
        self._begin(0)
        engine = self._deepspeed
        engine.module.eval()
        engine._compute_loss = True
        engine.total_loss = None
        engine.set_dataiterator(self._feed(listed, factors))
        with torch.no_grad():
            engine._exec_schedule(engine._inference_schedule(len(listed)))
        engine.fwd_outputs = []
        engine.module.train()
        return self._sums

    def _begin(self, step_index: int) -> None:
        self._sums, self._forward_index, self._step_index = {}, 0, step_index

    def _feed(self, batches: Iterable[Batch | None], factors: torch.Tensor) -> Iterator[tuple[Tensors, Tensors]]:
        """Inputs for the first stage; labels, with the factors beside them, for the last; on the device already."""
        device, engine = self._deepspeed.device, self._deepspeed
        for batch in batches:
            assert batch is not None  # stages between the first and the last ask for nothing
            inputs = model_inputs(batch) if engine.is_first_stage() else ()
            labels = self._settings.labels(batch) if engine.is_last_stage() else ()
            yield (
                tuple(tensor.to(device, non_blocking=True) for tensor in inputs),
                (*(tensor.to(device, non_blocking=True) for tensor in labels), factors),
            )

    def _loss(self, outputs: Tensors, labels: Tensors) -> torch.Tensor:
        *label_tensors, factors = labels
        loss, stats = self._settings.loss(outputs, tuple(label_tensors), factors)
        add_into(self._sums, stats)
        return loss

    def _seeded_forward_pass(self) -> Callable[[PipelineEngine, int], None]:
        """The forward instruction, which first names the micro-batch to the dropout streams."""

        def run(engine: PipelineEngine, buffer_id: int) -> None:
            number = self._settings.micro_batch_number(self._forward_index)
            self._settings.parallel.dropout.micro_batch = (self._step_index, number)
            self._forward_index += 1
            PipelineEngine._exec_forward_pass(engine, buffer_id)
            if engine.is_last_stage():
                # Only the loss is needed from here on; the engine would keep the logits until the buffer's next use.
                engine.pipe_buffers["outputs"][buffer_id] = engine.pipe_buffers["labels"][buffer_id] = None

        return run


def _exec_reduce_tied_grads(engine: PipelineEngine) -> None:
    """Add up the tied weight's gradients of its stages, wherever this wrapper keeps them.

    PipelineEngine looks at `weight.grad`, but stage 1 in 16 bits accumulates in fp32 elsewhere: the copies of the
    weight would drift apart (deepspeed 0.19.8, pipe/engine.py _exec_reduce_tied_grads).
    """
    find = getattr(engine.optimizer, "get_gradient_for_reduction", None)
    if find is None or engine.using_bf16_optimizer:
        PipelineEngine._exec_reduce_tied_grads(engine)
        return
    for weight, group in engine.module.get_tied_weights_and_groups():
        gradient = find(weight)
        if gradient is not None:
            torch.distributed.all_reduce(gradient, group=group)


def _wait_for_update(engine: PipelineEngine, lr_kwargs: Any = None) -> None:
    """The schedule's optimizer step: nothing; PipelinePasses.update() is called once the step's figures are known."""


def _not_yet(*_: Any) -> torch.Tensor:
    raise AssertionError("PipelinePasses sets the loss")
