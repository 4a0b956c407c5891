"""Replacements of instructions of DeepSpeed's pipeline schedule that do not fit this project's stages.

Written against deepspeed 0.19.8, runtime/pipe/engine.py; `_INSTRUCTION_MAP` of the engine lists the instructions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine


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
                _set_zero_gradient(optimizer, weight)
            gradient = find(weight)
        torch.distributed.all_reduce(gradient, group=group)


def reduce_grads(engine: PipelineEngine) -> None:
    """Average the gradients over the data-parallel ranks; DeepSpeed's own way would round fp32 sums to bf16."""
    if engine.using_bf16_optimizer:
        engine.optimizer.reduce_gradients()
    else:
        PipelineEngine._exec_reduce_grads(engine)


def _set_zero_gradient(optimizer: object, weight: torch.nn.Parameter) -> None:
    """Give a parameter a gradient of zeros in the attribute that ZeRO stage 1 accumulates into."""
    if getattr(optimizer, "use_grad_accum_attribute", False):
        weight.grad_accum = torch.zeros_like(weight, dtype=torch.float32)
    else:
        weight.grad = torch.zeros_like(weight)


def allocate_buffer(engine: PipelineEngine, index: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a buffer for one incoming tensor; DeepSpeed would reuse one of another data type."""
    return torch.empty(*shape, dtype=dtype, device=engine.device)
