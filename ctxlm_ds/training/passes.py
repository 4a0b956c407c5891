"""Forward and backward passes of a step through a plain DeepSpeed engine (no pipeline).

In: a rank's micro-batches and the terms' factors. Out: the objective's sums, gradients inside the engine.
Not here: what the sums mean, the gate before the update (engine.py); pipelines (pipeline.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.objectives.base import Objective
from ctxlm_ds.objectives.losses import weighted_loss
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.training.figures import add_into

Sums = dict[str, torch.Tensor]


MODEL_INPUTS = (
    "input_ids", "token_type_ids", "position_ids", "sequence_ids", "sequence_starts", "prediction_positions",
    "cls_positions",
)  # fmt: skip


def model_inputs(batch: Batch) -> tuple[torch.Tensor, ...]:
    """Return what the first layer takes, zeros for fields that the objective has not."""
    rows = len(batch.fields["input_ids"])
    absent = {"token_type_ids": torch.zeros_like(batch.fields["input_ids"])}
    zeros = torch.zeros(rows, 1, dtype=torch.int64)
    return tuple(batch.fields.get(name, absent.get(name, zeros)) for name in MODEL_INPUTS)


class LossFunction:
    """The torch half of an objective."""

    def __init__(self, objective: Objective) -> None:
        self._terms = objective.terms
        self.terms = tuple(term.name for term in objective.terms)

    def labels(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the labels of each term."""
        return tuple(batch.fields[term.labels[0]] for term in self._terms)

    def loss(
        self,
        outputs: tuple[torch.Tensor, ...],
        labels: tuple[torch.Tensor, ...],
        factors: torch.Tensor,
        parallel: ParallelContext | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss and its sums (losses.weighted_loss)."""
        return weighted_loss(self.terms, outputs, labels, factors, parallel)


@dataclass
class PassSettings:
    """What every kind of pass needs beside DeepSpeed's engine."""

    objective: Any
    parallel: ParallelContext
    topology: Topology
    is_fp16: bool

    def __post_init__(self) -> None:
        self.objective = LossFunction(self.objective)

    def labels(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the labels of each term."""
        labels: tuple[torch.Tensor, ...] = self.objective.labels(batch)
        return labels

    def micro_batch_number(self, index: int) -> int:
        """Place in the global batch of this rank's index-th micro-batch."""
        return index * self.topology.data_parallel_size + self.topology.data_parallel_rank

    def loss(
        self, outputs: tuple[torch.Tensor, ...], labels: tuple[torch.Tensor, ...], factors: torch.Tensor
    ) -> tuple[torch.Tensor, Sums]:
        """The micro-batch's loss to go backward from, and its sums."""
        loss, stats = self.objective.loss(outputs, labels, factors, self.parallel)
        return (_overflowing(loss) if self.is_fp16 else loss), stats


class PlainPasses:
    """Passes over the whole model on every rank, under any ZeRO stage."""

    def __init__(self, engine: Any, settings: PassSettings) -> None:
        self._deepspeed = engine
        self._settings = settings

    def train(self, step: Step, step_index: int, factors: torch.Tensor) -> Sums:
        """Gradients of all micro-batches; the sums of this rank's."""
        self._deepspeed.train()
        sums: Sums = {}
        for index, batch in enumerate(step.micro_batches):
            self._settings.parallel.dropout.micro_batch = (step_index, self._settings.micro_batch_number(index))
            loss, stats = self._forward(batch, factors)
            self._deepspeed.backward(loss)
            add_into(sums, stats)
            if index + 1 < len(step.micro_batches):
                self._deepspeed.step()
        return sums

    def update(self) -> None:
        """Apply the gradients."""
        self._deepspeed.step()

    def evaluate(self, batches: Iterable[Batch | None], factors: torch.Tensor) -> Sums:
        """The sums of this rank's batches in evaluation mode."""
        self._deepspeed.eval()
        sums: Sums = {}
        for batch in batches:
            assert batch is not None
            add_into(sums, self._forward(batch, factors)[1])
        self._deepspeed.train()
        return sums

    def _forward(self, batch: Batch, factors: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        device = self._deepspeed.device
        inputs = tuple(tensor.to(device, non_blocking=True) for tensor in model_inputs(batch))
        labels = tuple(tensor.to(device, non_blocking=True) for tensor in self._settings.labels(batch))
        return self._settings.loss(self._deepspeed(inputs), labels, factors)


def _overflowing(loss: torch.Tensor) -> torch.Tensor:
    """The loss, its gradients not finite where it is not: fp16 may overflow to a loss of infinity over finite ones,
    and DeepSpeed, which looks at gradients alone, would apply them.
    """
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)
