"""The end of a step: its sums over all ranks, the verdict, and applying or dropping the gradients, in any ZeRO stage.

The sums are the step's losses, the counts of the step after it, and the ranks' flags: one float64 vector on the device,
added up by one all-reduce of the training backend.

DeepSpeed's optimizers read the gradients' norm between reduction and update and drop gradients whose norm is not
finite. This module reads it for them, with the figures of the step, and gives them the norm in CPU memory: infinite to
drop an update. So a step waits for the device once (with fp16 under stage 3, and offload, more often). The attribute
names are those of DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py: `step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.objectives.base import LossTerm
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.process.patches import replaced
from ctxlm_ds.training.engine.fragments import Holding
from ctxlm_ds.training.engine.losses import SUMS, Sums, means, weighted_total
from ctxlm_ds.training.loop.state import Ahead, Anomaly

CLIP_EPS = 1e-6
"""As in DeepSpeed's and torch's clipping."""
Judge = Callable[[list[float]], bool]
FindSpike = Callable[[float], Anomaly | None]
"""Returns what is wrong with a finite loss of the global batch, or None."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What the ranks' parts of a step contain together."""

    predictions: list[float]
    """Divisor of each term's sum."""
    num_tokens: int
    """Positions that are not padding."""


class StepTotals:
    """Adds up vectors over the ranks and keeps the counts of the next step."""

    def __init__(self, terms: Sequence[LossTerm], topology: Topology, device: torch.device) -> None:
        self._terms = [term.name for term in terms]
        self._names = [f"{term}/{figure}" for term in self._terms for figure in SUMS]
        self._topology = topology
        self._device = device
        self._known: tuple[Step, Counts] | None = None
        self._next_step: Step | None = None

    def counts_of(self, step: Step) -> Counts:
        """Return the counts of a step: those added up in the step before, or added up now."""
        if self._known is None or self._known[0] is not step:
            total = self._topology.add_on_device(self._on_device(self._own_counts(step)))
            self._known = step, _counts(total.tolist())
        return self._known[1]

    def start(self, sums: Sums, ahead: Ahead) -> torch.Tensor:
        """Start adding up this rank's sums and what it knows ahead; return the vector, [length] float64."""
        self._next_step = ahead.next_step
        host = [*self._own_counts(ahead.next_step), *ahead.flags]
        return self._topology.add_on_device(torch.cat([self._losses(sums), self._on_device(host)]))

    def finish(self, values: Sequence[float]) -> tuple[dict[str, float], tuple[float, ...]]:
        """Return the sums by name and the flags, from the vector's values; keep the counts of the next step."""
        losses, counts = len(self._names), len(self._terms) + 1
        self._known = None
        if self._next_step is not None:
            self._known = self._next_step, _counts(values[losses : losses + counts])
        return dict(zip(self._names, values[:losses], strict=True)), tuple(values[losses + counts :])

    def evaluation(self, sums: Sums) -> Mapping[str, float]:
        """Return sums added up over the ranks."""
        return dict(zip(self._names, self._topology.add_on_device(self._losses(sums)).tolist(), strict=True))

    def _losses(self, sums: Sums) -> torch.Tensor:
        """Return this rank's sums on the device; one rank per model contributes."""
        if sums and self._topology.speaks_for_losses:
            return torch.stack([sums[name].double() for name in self._names])
        return torch.zeros(len(self._names), dtype=torch.float64, device=self._device)

    def _own_counts(self, step: Step | None) -> list[float]:
        if step is None or not self._topology.speaks_for_data:
            return [0.0] * (len(self._terms) + 1)
        return [*(float(step.counts[term]) for term in self._terms), float(step.num_tokens)]

    def _on_device(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).to(self._device, non_blocking=True)


def _counts(values: Sequence[float]) -> Counts:
    return Counts(list(values[:-1]), int(values[-1]))


@dataclass
class StepJudge:
    """Reads a step's values and decides whether its update must be refused; the same on every rank."""

    totals: StepTotals
    terms: Sequence[LossTerm]
    step_index: int
    is_fp16: bool
    find_spike: FindSpike
    total: float = math.nan
    """Loss of the step; this and what follows is known once the judge was called."""
    losses: dict[str, float] = field(default_factory=dict)
    accuracy: dict[str, float] = field(default_factory=dict)
    flags: tuple[float, ...] = ()
    anomaly: Anomaly | None = None

    def __call__(self, values: Sequence[float]) -> bool:
        """Return True to refuse the update; `values` are those of StepTotals.start's vector."""
        sums, self.flags = self.totals.finish(values)
        self.losses, self.accuracy = means(self.terms, sums)
        self.total = weighted_total(self.terms, self.losses)
        self.anomaly = self._find_fault()
        return self.anomaly is not None

    def _find_fault(self) -> Anomaly | None:
        """Return what is wrong with the loss. In fp16 an infinite loss makes the gradients overflow instead."""
        if math.isfinite(self.total):
            return self.find_spike(self.total)
        if self.is_fp16:
            return None
        named = ", ".join(f"{name} {value}" for name, value in self.losses.items())
        return Anomaly("non_finite", f"the loss of step {self.step_index + 1} is {self.total} ({named})")


@dataclass(frozen=True, slots=True)
class Update:
    """The result of applying or dropping the gradients of a step."""

    applied: bool
    grad_norm: float
    """Global L2 norm before clipping; infinite if it is not finite."""
    scale_exhausted: bool = False
    """True if fp16 overflowed at the smallest loss scale."""

    def anomaly(self, step_index: int, is_fp16: bool) -> Anomaly | None:
        """Return what is wrong with a norm that is not finite, except an fp16 overflow that a lower scale handles."""
        if self.scale_exhausted:
            return Anomaly(
                "non_finite",
                f"fp16 overflowed at the smallest loss scale in step {step_index + 1}: the loss has diverged; use "
                "bf16, a lower learning rate or gradient clipping",
            )
        if self.applied or is_fp16:
            return None
        return Anomaly("non_finite", f"the gradient norm of step {step_index + 1} is {self.grad_norm}")


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
        scaler = loss_scaler(self._zero)
        # Then the next overflow can no longer lower the scale.
        exhausted = scaler is not None and scaler.cur_scale <= scaler.min_scale and (
            scaler.delayed_shift == 1 or scaler.cur_hysteresis == 1
        )
        reading = _Reading(self._zero, figures, refuses, float(getattr(self._zero, "loss_scale", 1.0)))
        with reading.in_place_of_the_norm():
            self._step()
        if reading.refused is None:
            # DeepSpeed found an overflow by other means and measured nothing.
            assert self._zero.overflow, "DeepSpeed applied an update without a norm"
            reading.read([])
        applied = not self._zero.overflow
        assert not (applied and reading.refused), "DeepSpeed applied an update that was to be refused"
        if not applied and getattr(self._zero, "cpu_offload", False) and hasattr(self._zero, "averaged_gradients"):
            # DeepSpeed keeps the fp32 gradients of an offloaded optimizer at an overflow, and would add to them.
            for group in self._zero.averaged_gradients:
                self._zero.averaged_gradients[group] = None
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


@dataclass
class _Reading:
    """The read of a step's figures and norm in the middle of DeepSpeed's step."""

    zero: Any
    figures: torch.Tensor
    refuses: Judge
    scale: float
    refused: bool | None = None
    """None until the figures were read."""
    norm: float = math.inf
    """True norm, also of a refused update; infinite if it is not finite."""

    @contextmanager
    def in_place_of_the_norm(self) -> Iterator[None]:
        """Make DeepSpeed's step take its norm from `read`, infinite if the update is refused."""
        zero, update_scale = self.zero, getattr(self.zero, "_update_scale", None)
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
        host = _read_together(self.figures, tensors)
        count = len(self.figures)
        self.refused = self.refuses(host[:count].tolist())
        found = [value.to(norm.dtype) for value, norm in zip(host[count:].unbind(), tensors, strict=True)]
        if found:
            norm = self._combined(found) / self.scale
            # DeepSpeed says -1 for a norm that is not finite.
            self.norm = norm if norm >= 0.0 else math.inf
        return [torch.full_like(norm, math.inf) for norm in found] if self.refused else found

    def _combined(self, norms: list[torch.Tensor]) -> float:
        if not hasattr(self.zero, "_get_norm_groups"):
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


def _norm_of(zero: Any) -> tuple[Any, str]:
    """Return what holds the function from which DeepSpeed's step takes the scaled norm or norms, and its name."""
    if hasattr(zero, "scaled_global_norm"):  # stages 1 and 2
        return zero, "scaled_global_norm"
    if hasattr(zero, "_get_norm_groups"):  # stage 3
        return zero, "_get_norm_groups"
    from deepspeed.runtime import bf16_optimizer  # stage 1 in bf16

    return bf16_optimizer, "get_global_norm_of_tensors"


@dataclass(frozen=True)
class Clipping:
    """Measures and scales the averaged gradients with ZeRO stage 0, exactly in every layout.

    A parameter that several ranks of a model hold counts once; a `max_norm` of 0 only measures.
    """

    parameters: Sequence[tuple[torch.nn.Parameter, Holding]]
    max_norm: float
    topology: Topology

    def measure(self) -> torch.Tensor:
        """Return the model's norm, 0-d on the device."""
        if self.topology.tensor_parallel_size * self.topology.pipeline_parallel_size == 1:
            return torch.nn.utils.get_total_norm(self._gradients())
        own = [
            parameter.grad
            for parameter, holding in self.parameters
            if parameter.grad is not None and not (holding.tensor_duplicate or holding.stage_duplicate)
        ]
        square = torch.zeros((), dtype=torch.float64, device=self.parameters[0][0].device)
        # Averaged over the copies of the weights already, so the first of them reports for all.
        if own and self.topology.replica_rank == 0:
            square = torch.nn.utils.get_total_norm(own).double().square()
        return self.topology.add_on_device(square).sqrt()

    def clip(self, norm: float) -> None:
        """Scale the gradients, whose norm is `norm`, down to the largest norm."""
        if 0.0 < self.max_norm < norm:
            torch._foreach_mul_(self._gradients(), self.max_norm / (norm + CLIP_EPS))

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter, _ in self.parameters if parameter.grad is not None]
