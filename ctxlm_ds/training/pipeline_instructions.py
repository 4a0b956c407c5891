"""Instructions of DeepSpeed's pipeline schedule that its own methods get wrong for this project's stages.

Written against deepspeed 0.19.8, runtime/pipe/engine.py; `_INSTRUCTION_MAP` of the engine names them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine


def backward_pass(engine: PipelineEngine, buffer_id: int) -> None:
    """Go backward through a stage once for all tensors that left it.

    DeepSpeed goes backward once for each of them, so that layers which several depend on would run, and recompute,
    as often.
    """
    if engine.is_last_stage():
        PipelineEngine._exec_backward_pass(engine, buffer_id)
        return
    floating = [x for x in engine.pipe_buffers["outputs"][buffer_id] if x.is_floating_point()]
    # What depends on no trained parameter up to here gets a gradient sent, and needs none.
    pairs = [(x, gradient) for x, gradient in zip(floating, engine.grad_layer, strict=True) if x.requires_grad]
    if engine.using_bf16_optimizer:
        engine.optimizer.clear_lp_grads()
    engine._running_engine_backward = True
    try:
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
    finally:
        engine._running_engine_backward = False
    if engine.using_bf16_optimizer and not engine._config.bfloat16_config.immediate_grad_update:
        engine.optimizer.update_hp_grads(clear_lp_grads=False)
    engine.pipe_buffers["output_tensors"][buffer_id] = None
    engine.pipe_buffers["outputs"][buffer_id] = None


def send_grads(engine: PipelineEngine, buffer_id: int) -> None:
    """Send a gradient for every floating tensor that arrived: zeros if this stage's layers passed none back."""
    for tensor in engine.pipe_buffers["inputs"][buffer_id]:
        if tensor.is_floating_point() and tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
    PipelineEngine._exec_send_grads(engine, buffer_id)


def reduce_tied_grads(engine: PipelineEngine) -> None:
    """Add up the gradients of tied parameters over the stages that hold them, wherever this wrapper keeps them.

    PipelineEngine looks at `weight.grad`, but stage 1 in 16 bits accumulates in fp32 elsewhere: the copies of the
    weight would drift apart. It also leaves out a parameter without a gradient, for which the other stages would wait
    without end: such a parameter gets zeros here.
    """
    optimizer = engine.optimizer
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
                _set_zero_gradient(optimizer, weight)
            gradient = find(weight)
        torch.distributed.all_reduce(gradient, group=group)


def _set_zero_gradient(optimizer: object, weight: torch.nn.Parameter) -> None:
    """Give a parameter a gradient of zeros where ZeRO stage 1 accumulates it."""
    if getattr(optimizer, "use_grad_accum_attribute", False):
        weight.grad_accum = torch.zeros_like(weight, dtype=torch.float32)
    else:
        weight.grad = torch.zeros_like(weight)


def allocate_buffer(engine: PipelineEngine, index: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a buffer for one tensor that arrives, of its own shape and type.

    DeepSpeed takes one list of buffers for activations and gradients and keeps a buffer whatever its type.
    """
    return torch.empty(*shape, dtype=dtype, device=engine.device)
