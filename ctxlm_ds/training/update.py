"""Applying a step's gradients, or dropping them without a trace, under every ZeRO stage.

In: a DeepSpeed engine that holds a step's reduced gradients. Out: the weights updated, or nothing changed and the
engine ready for the next step. The gradients' norm decides last: DeepSpeed's optimizers look at it between reduction
and update and drop what is not finite; to refuse an update, they are told such a norm. The attribute names are those
of DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py: `step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Update:
    """What became of a step's gradients."""

    applied: bool
    grad_norm: float
    """Global L2 norm before clipping; infinite where it is not finite."""
    scale_exhausted: bool = False
    """True where fp16 overflowed although the loss scale can fall no further."""


class Updater:
    """Applies or refuses updates.

    Args:
        zero: DeepSpeed's optimizer wrapper; with ZeRO stage 0 the optimizer itself.
        step: has DeepSpeed take its step at the boundary of accumulation.
        clip: with ZeRO stage 0: clips the gradients and gives their norm before that; None under the other stages,
            where DeepSpeed does it.
    """

    def __init__(self, zero: Any, step: Callable[[], None], clip: Callable[[], float] | None) -> None:
        self._zero = zero
        self._step = step
        self._clip = clip
        scaler = loss_scaler(zero)
        if scaler is not None:
            # It would raise between the check and the clearing of gradients; Update says so instead.
            scaler.raise_error_at_min_scale = False

    def apply(self) -> Update:
        """Update the weights, unless the gradients' norm is not finite."""
        if self._clip is not None:
            norm = self._clip()
            if not math.isfinite(norm):
                self._step_without_update()
                return Update(False, norm)
            self._step()
            return Update(True, norm)
        exhausted = _is_exhausted(loss_scaler(self._zero))
        self._step()
        applied = not self._zero.overflow
        norm = float(self._zero._global_grad_norm)
        if not applied:
            _drop_offloaded_gradients(self._zero)
        return Update(applied, norm, exhausted and not applied)

    def refuse(self) -> Update:
        """Drop the gradients; weights, moments and counters stay. An fp16 overflow lowers the loss scale as ever."""
        if self._clip is not None:
            norm = self._clip()
            self._step_without_update()
            return Update(False, norm)
        exhausted = _is_exhausted(loss_scaler(self._zero))
        with _invalid_norm(self._zero) as refusal:
            self._step()
        assert self._zero.overflow, "DeepSpeed applied an update that was to be refused"
        _drop_offloaded_gradients(self._zero)
        return Update(False, refusal.norm, exhausted and not math.isfinite(refusal.norm))

    def _step_without_update(self) -> None:
        """DeepSpeed's bookkeeping and its clearing of gradients alone."""
        with _replaced(self._zero, "step", lambda closure=None: None):
            self._step()


def loss_scaler(zero: Any) -> Any | None:
    """DeepSpeed's scaler in fp16; its other precisions have one that must stay as it is."""
    scaler = getattr(zero, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None


def _drop_offloaded_gradients(zero: Any) -> None:
    """Finish what DeepSpeed leaves undone: with 16-bit weights and an offloaded optimizer, stages 1 and 2 add up the
    gradients in fp32 buffers, which an overflow leaves as they are; the next step would add to them.
    """
    if getattr(zero, "cpu_offload", False) and hasattr(zero, "averaged_gradients"):
        for group in zero.averaged_gradients:
            zero.averaged_gradients[group] = None


def _is_exhausted(scaler: Any | None) -> bool:
    """Whether the next overflow could not lower the scale any more."""
    if scaler is None or scaler.cur_scale > scaler.min_scale:
        return False
    return scaler.delayed_shift == 1 or scaler.cur_hysteresis == 1


@dataclass
class _Refusal:
    norm: float = math.inf
    """The true norm; infinite as well where DeepSpeed saw an overflow before it came to the norm."""


@contextmanager
def _invalid_norm(zero: Any) -> Iterator[_Refusal]:
    """DeepSpeed's step finds the gradients' norm infinite; the loss scaler hears of it only where it is so."""
    refusal = _Refusal()
    name, measure, invalid = _norm_of(zero)
    true_update_scale = getattr(zero, "_update_scale", None)

    def measure_and_refuse() -> Any:
        norm = float(measure()) / float(getattr(zero, "loss_scale", 1.0))
        refusal.norm = norm if norm >= 0.0 else math.inf
        return invalid

    def update_scale(overflow: bool = False) -> None:
        if true_update_scale is not None and not math.isfinite(refusal.norm):
            true_update_scale(overflow)

    with _replaced(zero, name, measure_and_refuse):
        if true_update_scale is None:
            yield refusal
            return
        with _replaced(zero, "_update_scale", update_scale):
            yield refusal


def _norm_of(zero: Any) -> tuple[str, Callable[[], Any], Any]:
    """The method that DeepSpeed's step takes the norm from, the norm times the loss scale, and what stands for a norm
    that is not finite.
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
    """An attribute of this one object that stands before its class's."""
    setattr(holder, name, value)
    try:
        yield
    finally:
        delattr(holder, name)
