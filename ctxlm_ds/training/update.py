"""Clipping, and applying or dropping the gradients of a step, under every ZeRO stage.

DeepSpeed's optimizers check the gradients' norm between reduction and update and drop gradients whose norm is not
finite. To drop an update, this module gives them an infinite norm. The attribute names are those of DeepSpeed 0.19.8
(runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py: `step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.training.fragments import Holding

CLIP_EPS = 1e-6
"""As in DeepSpeed's and torch's clipping."""


@dataclass(frozen=True, slots=True)
class Update:
    """The result of applying or dropping the gradients of a step."""

    applied: bool
    grad_norm: float
    """Global L2 norm before clipping; infinite if it is not finite."""
    scale_exhausted: bool = False
    """True if fp16 overflowed at the smallest loss scale."""


class Updater:
    """Applies or refuses updates.

    Args:
        zero: DeepSpeed's optimizer wrapper; with ZeRO stage 0 the optimizer itself.
        step: makes DeepSpeed take its step at the end of accumulation.
        clip: with ZeRO stage 0, clips the gradients and returns their norm before; None if DeepSpeed does it.
    """

    def __init__(self, zero: Any, step: Callable[[], None], clip: Callable[[], float] | None) -> None:
        self._zero = zero
        self._step = step
        self._clip = clip
        scaler = loss_scaler(zero)
        if scaler is not None:
            # It would raise before gradients are cleared; Update.scale_exhausted reports it instead.
            scaler.raise_error_at_min_scale = False

    def end_step(self, refuse: bool) -> Update:
        """Update the weights, or drop the gradients if their norm is not finite or the update is refused.

        Without an update, weights, moments and counters stay. An fp16 overflow still lowers the loss scale.
        """
        if self._clip is not None:
            norm = self._clip()
            applied = math.isfinite(norm) and not refuse
            # Without an update, only DeepSpeed's bookkeeping and its clearing of gradients are left.
            with nullcontext() if applied else _replaced(self._zero, "step", lambda closure=None: None):
                self._step()
            return Update(applied, norm)
        exhausted = _is_exhausted(loss_scaler(self._zero))
        if refuse:
            norm = self._refuse()
            assert self._zero.overflow, "DeepSpeed applied an update that was to be refused"
        else:
            self._step()
            norm = float(self._zero._global_grad_norm)
        applied = not self._zero.overflow
        if not applied:
            _drop_offloaded_gradients(self._zero)
        overflowed = not (math.isfinite(norm) if refuse else applied)
        return Update(applied, norm, exhausted and overflowed)

    def _refuse(self) -> float:
        """Take a step in which DeepSpeed sees an infinite norm; return the true one, infinite after an fp16 overflow.

        The loss scaler is updated only if the true norm is infinite.
        """
        zero, true_norm = self._zero, math.inf
        name, measure, invalid = _norm_of(zero)
        true_update_scale = getattr(zero, "_update_scale", None)

        def measure_and_refuse() -> Any:
            nonlocal true_norm
            norm = float(measure()) / float(getattr(zero, "loss_scale", 1.0))
            true_norm = norm if norm >= 0.0 else math.inf
            return invalid

        def update_scale(overflow: bool = False) -> None:
            if true_update_scale is not None and not math.isfinite(true_norm):
                true_update_scale(overflow)

        with _replaced(zero, name, measure_and_refuse), _replaced(zero, "_update_scale", update_scale):
            self._step()
        return true_norm


def loss_scaler(zero: Any) -> Any | None:
    """Return DeepSpeed's scaler in fp16; those of other precisions must not change."""
    scaler = getattr(zero, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None


def _drop_offloaded_gradients(zero: Any) -> None:
    """Drop the fp32 gradients of an offloaded optimizer, which DeepSpeed keeps at an overflow and would add to."""
    if getattr(zero, "cpu_offload", False) and hasattr(zero, "averaged_gradients"):
        for group in zero.averaged_gradients:
            zero.averaged_gradients[group] = None


def _is_exhausted(scaler: Any | None) -> bool:
    """Return whether the next overflow can no longer lower the scale."""
    if scaler is None or scaler.cur_scale > scaler.min_scale:
        return False
    return scaler.delayed_shift == 1 or scaler.cur_hysteresis == 1


def _norm_of(zero: Any) -> tuple[str, Callable[[], Any], Any]:
    """Return the method that DeepSpeed's step reads the norm from, how to compute the scaled norm, and its value for
    a norm that is not finite.
    """
    infinite = torch.tensor(math.inf)
    if hasattr(zero, "scaled_global_norm"):  # stages 1 and 2
        return "scaled_global_norm", zero.scaled_global_norm, infinite
    if hasattr(zero, "_get_norm_groups"):  # stage 3
        from deepspeed.runtime.utils import combine_grad_norm_groups

        groups = zero._get_norm_groups
        return "_get_norm_groups", lambda: combine_grad_norm_groups(groups()), [infinite]
    from deepspeed.runtime.utils import get_global_norm_of_tensors

    gradients = zero.get_grads_for_norm  # BF16_Optimizer: stage 1 in bf16
    device = zero.fp32_groups_flat_partition[0].device
    return (
        "get_grads_for_norm",
        lambda: get_global_norm_of_tensors(gradients()[0], mpu=zero.mpu, norm_type=zero.norm_type),
        ([infinite.to(device)], {}),
    )


@contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Override an attribute of one object."""
    setattr(holder, name, value)
    try:
        yield
    finally:
        delattr(holder, name)


def clip_gradients(
    parameters: Sequence[tuple[torch.nn.Parameter, Holding]], max_norm: float, topology: Topology
) -> float:
    """Scale the averaged gradients down to `max_norm` (0 only measures); return the model's L2 norm before that.

    A parameter that several ranks of a model hold counts once. Used with ZeRO stage 0, exact in every layout.
    """
    gradients = [parameter.grad for parameter, _ in parameters if parameter.grad is not None]
    if topology.tensor_parallel_size * topology.pipeline_parallel_size == 1:
        norm = float(torch.nn.utils.get_total_norm(gradients))
    else:
        norm = math.sqrt(_global_square(parameters, topology))
    if 0.0 < max_norm < norm:
        torch._foreach_mul_(gradients, max_norm / (norm + CLIP_EPS))
    return norm


def _global_square(parameters: Sequence[tuple[torch.nn.Parameter, Holding]], topology: Topology) -> float:
    own = [
        parameter.grad
        for parameter, holding in parameters
        if parameter.grad is not None and not (holding.tensor_duplicate or holding.stage_duplicate)
    ]
    square = torch.zeros((), dtype=torch.float64)
    # Averaged over the data-parallel ranks already, so the first of them reports for all.
    if own and topology.data_parallel_rank == 0:
        square = torch.nn.utils.get_total_norm(own).double().square().cpu()
    return float(topology.all_reduce_sum(square))
