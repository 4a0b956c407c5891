"""The layer list as DeepSpeed's pipeline: its stages, and the passes of a step through them.

DeepSpeed's schedule (1F1B) and transfers are unchanged. The optimizer's step is removed from the schedule, so that the
engine can refuse an update, and some instructions that do not fit this project's stages are replaced. Written against
deepspeed 0.19.8, runtime/pipe/engine.py; `_INSTRUCTION_MAP` of its engine lists the instructions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.models.layers import (
    Crossing,
    Flow,
    LayerDescription,
    Tensors,
    carried_states,
    dropout_numbers,
    parameter_prefixes,
    repeated_layers,
    run_layer,
)
from ctxlm_ds.parallel.context import DropoutStreams
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.training.engine.forward_backward import EVALUATION, PassContext
from ctxlm_ds.training.engine.losses import Sums, add_into
from ctxlm_ds.training.engine.runtime import pipeline_topology

BIT_CAST = {
    torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.bool: torch.uint8,
}  # fmt: skip
"""Integer types as which tensors without a gradient cross a cut: DeepSpeed expects a gradient for every floating
tensor, and gloo sends no booleans. Integers cross as int64."""


def _spec(description: LayerDescription) -> LayerSpec:
    """Return DeepSpeed's specification of a layer, tied if several stages may share its parameters."""
    if description.tie_key is None:
        spec = LayerSpec(nn.Module)
    else:
        with torch.device("meta"):
            names = [name for name, _ in description.build().named_parameters()]
        spec = TiedLayerSpec(_module_key(description), nn.Module, tied_weight_attr=names)
    spec.build = lambda log=False: description.build()
    return spec


def _module_key(description: LayerDescription) -> str:
    """Return the tie key as a module name, which must not contain dots."""
    return str(description.tie_key).replace(".", "/")


class PipelineStage(PipelineModule):
    """This rank's stage; it runs its layers exactly as LayerSequence does."""

    def __init__(
        self,
        descriptions: Sequence[LayerDescription],
        outputs: Sequence[str],
        bounds: Sequence[int],
        topology: Topology,
        streams: DropoutStreams,
        dtype: torch.dtype,
    ) -> None:
        """Build this rank's layers; `bounds` are the first layer of each stage, and the number of layers."""
        self._bounds = list(bounds)
        self._streams = streams
        streams.num_layers = len(descriptions)
        specs = list(map(_spec, descriptions))
        super().__init__(specs, topology=pipeline_topology(topology), partition_method="bounds")
        flow = Flow(descriptions, outputs)
        self.inputs = flow.inputs
        self.carried = carried_states(descriptions[self._local_start : self._local_stop])
        self._is_first, self._is_last = self._local_start == 0, self._local_stop == len(descriptions)
        self._arriving = flow.before(self._local_start)
        self._leaving = flow.before(self._local_stop)
        self._outputs = flow.outputs
        self._prefixes = parameter_prefixes(descriptions)
        self._numbers = dropout_numbers(descriptions)
        self._dtype = dtype
        self._own_dtypes = {
            name: d.dtype for d in descriptions if d.dtype is not None for name in (*d.reads, *d.writes)
        }
        self._steps: list[tuple[int, LayerDescription, nn.Module]] = []
        repeated = repeated_layers(descriptions[self._local_start : self._local_stop])
        for index in range(self._local_start, self._local_stop):
            description = descriptions[index]
            if index - self._local_start in repeated:
                continue
            tied = description.tie_key is not None
            module = self.tied_modules[_module_key(description)] if tied else getattr(self, str(index))
            self._steps.append((index, description, module))

    def _partition_layers(self, method: str = "bounds") -> None:
        self.parts = self._bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self._bounds[stage], stop=self._bounds[stage + 1])

    def forward(self, inputs: Tensors) -> Tensors:
        """Map the previous stage's tensors, or the fields `inputs`, to the next stage's, or the outputs."""
        if self._is_first:
            tensors = dict(zip(self.inputs, inputs, strict=True))
        else:
            tensors = _unpack(inputs, self._arriving, self._dtype, self._own_dtypes)
        for index, description, module in self._steps:
            run_layer(description, module, tensors, self._numbers[index], self._streams, self.carried)
        if self._is_last:
            return tuple(tensors[name] for name in self._outputs)
        return _pack(tensors, self._leaving)

    def full_named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return this stage's parameters under their full names, each once."""
        named = (
            (f"{self._prefixes[index]}.{name}", parameter)
            for index, _, module in self._steps
            for name, parameter in module.named_parameters()
        )
        return list(dict(named).items())


def _pack(tensors: dict[str, torch.Tensor], leaving: Crossing) -> Tensors:
    """Return the tensors that later stages need: those with a gradient first, others as integers."""
    floats = tuple(tensors[name].contiguous() for name in leaving.with_gradient)
    return (*floats, *(_as_integers(tensors[name].detach().contiguous()) for name in leaving.without_gradient))


def _as_integers(x: torch.Tensor) -> torch.Tensor:
    is_integer = not x.is_floating_point() and x.dtype != torch.bool
    return x.long() if is_integer else x.view(BIT_CAST[x.dtype])


def _unpack(
    inputs: Tensors, arriving: Crossing, dtype: torch.dtype, own: Mapping[str, torch.dtype] | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of `_pack` by name; `dtype` is the type of 16-bit activations, `own` that of some tensors."""
    tensors = dict(zip(arriving.names, inputs, strict=True))
    casts = {torch.int32: torch.float32, torch.int16: dtype, torch.uint8: torch.bool}
    for name in arriving.without_gradient:
        integers = tensors[name]
        if integers.dtype in casts:
            tensors[name] = integers.view((own or {}).get(name, casts[integers.dtype]))
    return tensors


class PipelinePasses:
    """Passes through DeepSpeed's PipelineEngine; only the last stage returns sums."""

    def __init__(self, engine: PipelineEngine, context: PassContext) -> None:
        self._deepspeed = engine
        self._context = context
        self._sums: Sums = {}
        self._forward_index = 0
        self._step_index = 0
        engine.module.loss_fn = self._loss
        device = engine.device
        # DeepSpeed would reuse an incoming tensor's buffer of another data type.
        engine._allocate_or_extend_buffers = lambda _, shape, dtype: torch.empty(shape, dtype=dtype, device=device)
        engine._INSTRUCTION_MAP = {
            **engine._INSTRUCTION_MAP,
            schedule.ForwardPass: self._forward_pass,
            schedule.BackwardPass: backward_pass,
            schedule.SendGrad: send_grads,
            schedule.ReduceTiedGrads: reduce_tied_grads,
            schedule.ReduceGrads: reduce_grads,
            schedule.OptimizerStep: lambda engine, lr_kwargs=None: None,  # update() does it later
        }

    def train(self, step: Step, step_index: int, factors: torch.Tensor) -> Sums:
        """Compute the reduced gradients of all micro-batches; return the sums."""
        self._begin(step_index)
        self._deepspeed.train_batch(self._feed(step.micro_batches, factors))
        if self._deepspeed.steps_per_print() is None:
            # Otherwise the timer would keep two events per step.
            self._deepspeed.timers(TRAIN_BATCH_TIMER).reset()
        return self._sums

    def update(self) -> None:
        PipelineEngine._exec_optimizer_step(self._deepspeed)

    def evaluate(self, batches: Iterable[Batch | None], factors: torch.Tensor) -> Sums:
        """Return the sums over this rank's batches in evaluation mode."""
        listed = list(batches)
        self._begin(EVALUATION)
        engine = self._deepspeed
        engine.module.eval()
        engine.module.carried.begin_evaluation()
        engine._compute_loss = True
        engine.total_loss = None
        engine.set_dataiterator(self._feed(listed, factors))
        with torch.no_grad():
            engine._exec_schedule(engine._inference_schedule(len(listed)))
        engine.fwd_outputs = []
        engine.module.carried.end_evaluation()
        engine.module.train()
        return self._sums

    def _begin(self, step_index: int) -> None:
        self._sums, self._forward_index, self._step_index = {}, 0, step_index

    def _feed(self, batches: Iterable[Batch | None], factors: torch.Tensor) -> Iterator[tuple[Tensors, Tensors]]:
        """Yield inputs for the first stage, and labels and factors for the last, on the device."""
        engine, device = self._deepspeed, self._deepspeed.device
        read = engine.module.inputs if engine.is_first_stage() else ()
        judged = self._context.losses.label_fields if engine.is_last_stage() else ()
        for batch in batches:
            assert batch is not None  # Other stages do not read the iterator.
            inputs, labels = (
                tuple(self._context.own(batch.fields, name, device) for name in names) for names in (read, judged)
            )
            yield inputs, (*labels, factors)

    def _loss(self, outputs: Tensors, labels: Tensors) -> torch.Tensor:
        *label_tensors, factors = labels
        named = dict(zip(self._context.losses.label_fields, label_tensors, strict=True))
        loss, stats = self._context.loss(outputs, named, factors)
        add_into(self._sums, stats)
        return loss

    def _forward_pass(self, engine: PipelineEngine, buffer_id: int) -> None:
        """Run the forward instruction after setting the dropout keys of the micro-batch."""
        self._context.begin(engine, self._step_index, self._forward_index)
        self._forward_index += 1
        PipelineEngine._exec_forward_pass(engine, buffer_id)
        if engine.is_last_stage():
            # Only the loss is needed now; the engine would keep the logits until the buffer is reused.
            engine.pipe_buffers["outputs"][buffer_id] = engine.pipe_buffers["labels"][buffer_id] = None


def backward_pass(engine: PipelineEngine, buffer_id: int) -> None:
    """Run backward through a stage once for all of its outputs.

    DeepSpeed runs it once per output, so layers that several outputs depend on would run, and recompute, repeatedly.
    """
    if engine.is_last_stage():
        PipelineEngine._exec_backward_pass(engine, buffer_id)
        return
    floating = [x for x in engine.pipe_buffers["outputs"][buffer_id] if x.is_floating_point()]
    # An output that depends on no trained parameter receives a gradient but needs none.
    pairs = [(x, gradient) for x, gradient in zip(floating, engine.grad_layer, strict=True) if x.requires_grad]
    if engine.using_bf16_optimizer:
        engine.optimizer.clear_lp_grads()
    engine._running_engine_backward = True
    try:
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
    finally:
        engine._running_engine_backward = False
    engine.pipe_buffers["output_tensors"][buffer_id] = None
    engine.pipe_buffers["outputs"][buffer_id] = None


def send_grads(engine: PipelineEngine, buffer_id: int) -> None:
    """Send a gradient for every floating input, zeros if this stage's layers computed none."""
    for tensor in engine.pipe_buffers["inputs"][buffer_id]:
        if tensor.is_floating_point() and tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
    PipelineEngine._exec_send_grads(engine, buffer_id)


def reduce_tied_grads(engine: PipelineEngine) -> None:
    """Add up the gradients of tied parameters over the stages that hold them.

    PipelineEngine reads `weight.grad`, but stage 1 in 16 bits accumulates in fp32 elsewhere, so the copies would drift
    apart. It also skips parameters without a gradient, for which other stages would wait; here they get zeros.
    """
    optimizer = engine.optimizer
    if engine.using_bf16_optimizer:
        optimizer.complete_sums()
    find = getattr(optimizer, "get_gradient_for_reduction", None)
    for weight, group in engine.module.get_tied_weights_and_groups():
        if not weight.requires_grad:
            continue
        if engine.using_bf16_optimizer:
            gradient = weight._hp_grad
        elif find is None:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            gradient = weight.grad
        else:
            if find(weight) is None:
                # In the attribute that ZeRO stage 1 accumulates into.
                in_fp32 = getattr(optimizer, "use_grad_accum_attribute", False)
                name, dtype = ("grad_accum", torch.float32) if in_fp32 else ("grad", weight.dtype)
                setattr(weight, name, torch.zeros_like(weight, dtype=dtype))
            gradient = find(weight)
        torch.distributed.all_reduce(gradient, group=group)


def reduce_grads(engine: PipelineEngine) -> None:
    """Average the gradients over the data-parallel ranks; DeepSpeed's own way would round fp32 sums to bf16."""
    if engine.using_bf16_optimizer:
        engine.optimizer.reduce_gradients()
    else:
        PipelineEngine._exec_reduce_grads(engine)
