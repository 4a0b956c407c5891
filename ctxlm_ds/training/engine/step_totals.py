"""The sums over all ranks that a step needs: its losses, the counts of the step after it, and the ranks' flags.

They are one float64 vector on the device, added up by one all-reduce of the training backend. Nothing here waits for
the device but `counts_of` and `evaluation`; the updater reads a step's vector together with the gradient norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.objectives.base import LossTerm
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.training.engine.losses import SUMS, Sums, means, weighted_total
from ctxlm_ds.training.loop.state import Ahead, Anomaly

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


class StepJudge:
    """Reads a step's values and decides whether its update must be refused; the same on every rank."""

    def __init__(
        self, totals: StepTotals, terms: Sequence[LossTerm], step_index: int, is_fp16: bool, find_spike: FindSpike
    ) -> None:
        self._totals = totals
        self._terms = terms
        self._step_index = step_index
        self._is_fp16 = is_fp16
        self._find_spike = find_spike
        self.total = math.nan
        """Loss of the step; this and what follows is known once the judge was called."""
        self.losses: dict[str, float] = {}
        self.accuracy: dict[str, float] = {}
        self.flags: tuple[float, ...] = ()
        self.anomaly: Anomaly | None = None

    def __call__(self, values: Sequence[float]) -> bool:
        """Return True to refuse the update; `values` are those of StepTotals.start's vector."""
        sums, self.flags = self._totals.finish(values)
        self.losses, self.accuracy = means(self._terms, sums)
        self.total = weighted_total(self._terms, self.losses)
        self.anomaly = self._find_fault()
        return self.anomaly is not None

    def _find_fault(self) -> Anomaly | None:
        """Return what is wrong with the loss. In fp16 an infinite loss makes the gradients overflow instead."""
        if math.isfinite(self.total):
            return self._find_spike(self.total)
        if self._is_fp16:
            return None
        named = ", ".join(f"{name} {value}" for name, value in self.losses.items())
        return Anomaly("non_finite", f"the loss of step {self._step_index + 1} is {self.total} ({named})")
