"""Forward and backward passes of a step through a DeepSpeed engine without a pipeline (pipeline.py has the other)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.mappings import own_share
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.training.engine.losses import Sums, TermLosses, TokenChoice, add_into
from ctxlm_ds.training.loop.state import StepInterrupted

EVALUATION = -1
"""Step index in the random keys of evaluation."""


@dataclass
class PassContext:
    """The keys, the loss and the interruption that passes with and without a pipeline share."""

    losses: TermLosses | TokenChoice
    parallel: ParallelContext
    topology: Topology
    is_fp16: bool
    shares: Mapping[str, str]
    """What this rank reads of each field (Field.shared)."""
    micro_batches: int = 1
    """Micro-batches of each rank in a step, if the model carries tensors."""
    replays_graphs: bool = False
    """True if layers are CUDA graphs."""
    interrupted: Callable[[int], bool] = lambda index: False
    """Called on every rank before its index-th micro-batch of a step; True, on all ranks, abandons the step."""

    def micro_batch_number(self, index: int) -> int:
        """Return the number in the global batch of this rank's index-th micro-batch."""
        return index * self.topology.data_parallel_size + self.topology.data_parallel_rank

    def own(self, fields: Mapping[str, torch.Tensor], name: str, device: torch.device) -> torch.Tensor:
        """Return this rank's share of a field on the device."""
        return own_share(fields[name], self.shares[name], self.parallel).to(device, non_blocking=True)

    def begin(self, engine: Any, step_index: int, index: int) -> None:
        """Set the random keys and carried tensors of this rank's index-th micro-batch; evaluations have many steps."""
        self.parallel.dropout.begin(step_index, self.micro_batch_number(index), engine.device)
        engine.module.carried.begin(self.micro_batch_number(index % self.micro_batches))
        if self.replays_graphs:
            # Otherwise, without a backward pass, each layer would end the life of the output that it reads.
            torch.compiler.cudagraph_mark_step_begin()

    def loss(
        self, outputs: tuple[torch.Tensor, ...], labels: Mapping[str, torch.Tensor], factors: torch.Tensor
    ) -> tuple[torch.Tensor, Sums]:
        """Return the loss of a micro-batch and its sums; `outputs` are in the order of losses.outputs."""
        named = dict(zip(self.losses.outputs, outputs, strict=True))
        loss, stats = self.losses(named, labels, factors)
        if self.is_fp16:
            # NaN gradients of an infinite loss: DeepSpeed checks only gradients and would apply finite ones.
            loss = loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)
        return loss, stats


class PlainPasses:
    """Passes over the complete model on every rank, under any ZeRO stage."""

    def __init__(self, engine: Any, context: PassContext) -> None:
        self._deepspeed = engine
        self._context = context
        self._inputs: tuple[str, ...] = engine.module.inputs

    def train(self, step: Step, step_index: int, factors: torch.Tensor) -> Sums:
        """Compute the gradients of all micro-batches; return this rank's sums. Raises StepInterrupted."""
        if not self._deepspeed.module.training:
            self._deepspeed.train()
        sums: Sums = {}
        for index, batch in enumerate(step.micro_batches):
            if self._context.interrupted(index):
                raise StepInterrupted
            self._context.begin(self._deepspeed, step_index, index)
            loss, stats = self._forward(batch, factors)
            self._deepspeed.backward(loss)
            add_into(sums, stats)
            if index + 1 < len(step.micro_batches):
                self._deepspeed.step()
        return sums

    def update(self) -> None:
        self._deepspeed.step()

    def evaluate(self, batches: Iterable[Batch | None], factors: torch.Tensor) -> Sums:
        """Return the sums of this rank's batches in evaluation mode."""
        self._deepspeed.eval()
        self._deepspeed.module.carried.begin_evaluation()
        sums: Sums = {}
        for index, batch in enumerate(batches):
            assert batch is not None
            self._context.begin(self._deepspeed, EVALUATION, index)
            add_into(sums, self._forward(batch, factors)[1])
        self._deepspeed.module.carried.end_evaluation()
        self._deepspeed.train()
        return sums

    def _forward(self, batch: Batch, factors: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        device, inputs, labels = self._deepspeed.device, self._inputs, self._context.losses.label_fields
        # Each graph of a layer is recorded for one shape of its inputs.
        found = batch.fields if self._context.replays_graphs else batch.narrowed()
        fields = {name: self._context.own(found, name, device) for name in {*inputs, *labels}}
        outputs = self._deepspeed(tuple(fields[name] for name in inputs))
        return self._context.loss(outputs, {name: fields[name] for name in labels}, factors)
