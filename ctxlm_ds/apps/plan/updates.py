"""Bytes that gradients and the optimizer's update move in a rank's memory in a step, in addition to the backward pass.

They are counted operation by operation; tests/dist/test_updates.py counts those of engines.
"""

from __future__ import annotations

from ctxlm_ds.apps.plan.layouts import BYTES
from ctxlm_ds.apps.plan.states import FLOAT, StageParameters, total_elements, uses_bf16_optimizer
from ctxlm_ds.recipe.json_source import ZeroSettings
from ctxlm_ds.recipe.schema import TrainingConfig
from ctxlm_ds.recipe.sections import OptimizerSection

NORM_BYTES, CLIP_BYTES = 4, 8
ZERO_BYTES = 30
"""Bytes per element of DeepSpeedZeroOptimizer in addition: fp32 gradient, norm, flat copy, weight; counted 26 to 34."""
FIRST_SUM_BYTES, NEXT_SUM_BYTES = 6, 10
"""Bytes per element of the Bf16Optimizer: bf16 is copied into an fp32 sum (2 + 4), or added to it (2 + 4 + 4)."""
FLATTEN_BYTES = 16
"""Bytes per element of stage 0's all-reduce: gradients are copied into a flat buffer and back (8 + 8)."""
BUCKET_MOVES = 10
"""Times that stage 1 reads or writes a gradient: bucket, average, copy, partition."""
STAGE_2_MOVES, STAGE_2_SHARE_BYTES = 6, 22
"""Times that stages 2 and 3 read or write a micro-batch's gradient; bytes to add it to the rank's fp32 partition."""


def gradient_bytes(
    training: TrainingConfig, parameters: StageParameters, zero: ZeroSettings, data_ranks: int, micro_batches: int
) -> int:
    """Return the bytes that summing and reducing the gradients of a step's micro-batches moves."""
    elements, later = parameters.num_elements, micro_batches - 1
    weight, each_sum = BYTES[training.precision], BYTES[training.grad_accum_dtype]
    if uses_bf16_optimizer(training, zero):
        return elements * (FIRST_SUM_BYTES + NEXT_SUM_BYTES * later)
    # autograd reads both and writes their sum.
    summed = 3 * each_sum * later * elements
    if zero.stage == 0:
        return summed + FLATTEN_BYTES * elements
    if zero.stage == 1:
        return summed + BUCKET_MOVES * weight * elements
    return micro_batches * (STAGE_2_MOVES * weight + STAGE_2_SHARE_BYTES // data_ranks) * elements


def optimizer_bytes(
    optimizer: OptimizerSection, parameters: StageParameters, zero: ZeroSettings, data_ranks: int
) -> int:
    """Return the bytes that the optimizer moves in its share of the parameters."""
    ranks = data_ranks if zero.stage else 1
    matrices = total_elements(parameters.matrix_group) // ranks
    others = parameters.padded(ranks) // ranks - matrices
    return optimizer.bytes_per_element * others + optimizer.bytes_per_matrix_element * matrices


def update_bytes(
    training: TrainingConfig,
    optimizer: OptimizerSection,
    parameters: StageParameters,
    zero: ZeroSettings,
    data_ranks: int,
) -> int:
    """Return the bytes that norm, clipping, the optimizer and the copy of its weights move."""
    ranks = data_ranks if zero.stage else 1
    each = CLIP_BYTES if optimizer.gradient_clipping else 0
    if zero.stage == 0:
        each += NORM_BYTES
    elif uses_bf16_optimizer(training, zero):
        each += NORM_BYTES + FLOAT + BYTES[training.precision]
    else:
        each += ZERO_BYTES
    return each * (parameters.padded(ranks) // ranks) + optimizer_bytes(optimizer, parameters, zero, data_ranks)
