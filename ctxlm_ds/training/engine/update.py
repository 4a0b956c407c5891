"""Clipping, and applying or dropping the gradients of a step, under every ZeRO stage.

DeepSpeed's optimizers read the gradients' norm between reduction and update and drop gradients whose norm is not
finite. This module reads it for them, with the figures of the step, and gives them the norm in CPU memory: infinite to
drop an update. So a step waits for the device once (with fp16 under stage 3, and offload, more often). The attribute
names are those of DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py: `step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.training.engine.fragments import Holding
from ctxlm_ds.training.engine.runtime import replaced

CLIP_EPS = 1e-6
"""As in DeepSpeed's and torch's clipping."""
Judge = Callable[[list[float]], bool]


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

    A step's figures are read together with the norm, in the one read that DeepSpeed needs between reduction and update.
    `zero` is DeepSpeed's optimizer wrapper; with ZeRO stage 0 the optimizer itself, for which `clipping` measures and
    clips.
    """

    def __init__(self, zero: Any, step: Callable[[], None], clipping: Clipping | None) -> None:
        self._zero = zero
        self._step = step
        self._clipping = clipping
        scaler = loss_scaler(zero)
        if scaler is not None:
            # It would raise before gradients are cleared; Update.scale_exhausted reports it instead.
            scaler.raise_error_at_min_scale = False

    def end_step(self, figures: torch.Tensor, refuses: Judge) -> Update:
        """Update the weights, or drop the gradients if their norm is not finite or the update is refused.

        `refuses` gets the values of `figures`, [f] float64 on the device, before the update. Without an update,
        weights, moments and counters stay. An fp16 overflow still lowers the loss scale.
        """
        if self._clipping is not None:
            return self._end_plain_step(self._clipping, figures, refuses)
        exhausted = _is_exhausted(loss_scaler(self._zero))
        reading = _Reading(self._zero, figures, refuses)
        with reading.in_place_of_the_norm():
            self._step()
        if reading.refused is None:
            # DeepSpeed found an overflow by other means and measured nothing.
            assert self._zero.overflow, "DeepSpeed applied an update without a norm"
            reading.read([])
        applied = not self._zero.overflow
        assert not (applied and reading.refused), "DeepSpeed applied an update that was to be refused"
        if not applied:
            _drop_offloaded_gradients(self._zero)
        overflowed = not (math.isfinite(reading.norm) if reading.refused else applied)
        return Update(applied, reading.norm, exhausted and overflowed)

    def _end_plain_step(self, clipping: Clipping, figures: torch.Tensor, refuses: Judge) -> Update:
        *values, norm = _read_together(figures, [clipping.measure()]).tolist()
        refused = refuses(values)
        applied = math.isfinite(norm) and not refused
        if applied:
            clipping.clip(norm)
        # Without an update, only DeepSpeed's bookkeeping and its clearing of gradients are left.
        with nullcontext() if applied else replaced(self._zero, "step", lambda closure=None: None):
            self._step()
        return Update(applied, norm)


class _Reading:
    """The read of a step's figures and norm in the middle of DeepSpeed's step."""

    def __init__(self, zero: Any, figures: torch.Tensor, refuses: Judge) -> None:
        self._zero = zero
        self._figures = figures
        self._refuses = refuses
        self._scale = float(getattr(zero, "loss_scale", 1.0))
        self.refused: bool | None = None
        """None until the figures were read."""
        self.norm = math.inf
        """True norm, also of a refused update; infinite if it is not finite."""

    @contextmanager
    def in_place_of_the_norm(self) -> Iterator[None]:
        """Make DeepSpeed's step take its norm from `read`, infinite if the update is refused."""
        zero, update_scale = self._zero, getattr(self._zero, "_update_scale", None)
        holder, name = _norm_of(zero)
        measure = getattr(holder, name)

        def measure_and_read(*args: Any, **settings: Any) -> Any:
            found = measure(*args, **settings)
            return self.read(found) if isinstance(found, list) else self.read([found])[0]

        def note_overflow(overflow: bool = False) -> None:
            # The scaler counts only overflows of the gradients.
            if update_scale is not None and not (self.refused and math.isfinite(self.norm)):
                update_scale(overflow)

        with ExitStack() as stack:
            stack.enter_context(replaced(holder, name, measure_and_read))
            stack.enter_context(replaced(zero, "_update_scale", note_overflow))
            if hasattr(zero, "scaled_global_norm") and not zero.cpu_offload:
                # The norm shows what this would find, with a second pass over the gradients and another read.
                stack.enter_context(replaced(zero, "check_overflow", lambda **_: None))
            yield

    def read(self, norms: Sequence[Any]) -> list[torch.Tensor]:
        """Read the figures and norms, and judge; return the norms on the host, infinite to refuse the update."""
        tensors = [torch.as_tensor(norm) for norm in norms]
        host = _read_together(self._figures, tensors)
        count = len(self._figures)
        self.refused = self._refuses(host[:count].tolist())
        found = [value.to(norm.dtype) for value, norm in zip(host[count:].unbind(), tensors, strict=True)]
        if found:
            norm = self._combined(found) / self._scale
            # DeepSpeed says -1 for a norm that is not finite.
            self.norm = norm if norm >= 0.0 else math.inf
        return [torch.full_like(norm, math.inf) for norm in found] if self.refused else found

    def _combined(self, norms: list[torch.Tensor]) -> float:
        if not hasattr(self._zero, "_get_norm_groups"):
            return float(norms[0])
        from deepspeed.runtime.utils import combine_grad_norm_groups

        return float(combine_grad_norm_groups(norms))


def _read_together(figures: torch.Tensor, norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return figures and norms in CPU memory; the only place where a step waits for the device."""
    return torch.cat([figures, *(norm.detach().to(figures).reshape(1) for norm in norms)]).cpu()


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


def _norm_of(zero: Any) -> tuple[Any, str]:
    """Return what holds the function from which DeepSpeed's step takes the scaled norm or norms, and its name."""
    if hasattr(zero, "scaled_global_norm"):  # stages 1 and 2
        return zero, "scaled_global_norm"
    if hasattr(zero, "_get_norm_groups"):  # stage 3
        return zero, "_get_norm_groups"
    from deepspeed.runtime import bf16_optimizer  # stage 1 in bf16

    return bf16_optimizer, "get_global_norm_of_tensors"


class Clipping:
    """Measures and scales the averaged gradients with ZeRO stage 0, exactly in every layout.

    A parameter that several ranks of a model hold counts once; a `max_norm` of 0 only measures.
    """

    def __init__(
        self, parameters: Sequence[tuple[torch.nn.Parameter, Holding]], max_norm: float, topology: Topology
    ) -> None:
        self._parameters = parameters
        self._max_norm = max_norm
        self._topology = topology

    def measure(self) -> torch.Tensor:
        """Return the model's norm, 0-d on the device."""
        if self._topology.tensor_parallel_size * self._topology.pipeline_parallel_size == 1:
            return torch.nn.utils.get_total_norm(self._gradients())
        own = [
            parameter.grad
            for parameter, holding in self._parameters
            if parameter.grad is not None and not (holding.tensor_duplicate or holding.stage_duplicate)
        ]
        square = torch.zeros((), dtype=torch.float64, device=self._parameters[0][0].device)
        # Averaged over the data-parallel ranks already, so the first of them reports for all.
        if own and self._topology.data_parallel_rank == 0:
            square = torch.nn.utils.get_total_norm(own).double().square()
        return self._topology.add_on_device(square).sqrt()

    def clip(self, norm: float) -> None:
        """Scale the gradients, whose norm is `norm`, down to the largest norm."""
        if 0.0 < self._max_norm < norm:
            torch._foreach_mul_(self._gradients(), self._max_norm / (norm + CLIP_EPS))

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter, _ in self._parameters if parameter.grad is not None]
