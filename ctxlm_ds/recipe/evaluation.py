"""Settings of evaluations during a run, and of the tasks on which its checkpoints are judged. Imports no torch."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated

from pydantic import Field

from ctxlm_ds.recipe.sections import (
    NonNegativeFloat,
    NonNegativeSteps,
    PositiveFloat,
    PositiveSteps,
    Probability,
    Section,
    SmallInt,
)


class DownstreamTask(Section):
    """A task on which the exported model is fine-tuned while the run trains, by a process on rank 0's host."""

    task: str
    """Name of a shipped task, or a YAML description (docs/downstream.md)."""
    data: str
    """Folder of the task's files."""
    every_steps: PositiveSteps
    """Steps between checkpoints that are judged, a multiple of checkpoint.interval_steps; the last is judged too."""
    epochs: PositiveFloat = 3.0
    """Epochs of fine-tuning."""
    batch_size: SmallInt = 32
    """Examples of a fine-tuning step."""
    learning_rate: PositiveFloat = 5e-5
    """Peak learning rate of fine-tuning."""
    train_layers: NonNegativeSteps | None = None
    """Train the last layers and the head only (0: the head); null trains everything."""
    max_train_examples: PositiveSteps | None = None
    """Train on the first examples only."""
    seed: NonNegativeSteps = 1
    """Seed of the head and of the order of the examples."""
    threads: SmallInt = 1
    """CPU threads of the process, which uses no accelerator."""

    @property
    def name(self) -> str:
        """Return the task's name in the metrics."""
        return PurePath(self.task).stem


class EvaluationConfig(Section):
    """Evaluation on held-out data during the run."""

    interval_steps: NonNegativeSteps = 1000
    """Steps between evaluations, which also run at the end, and with initialize_from at step 0; 0: only these."""
    max_rows: PositiveSteps = 2048
    """Rows to evaluate per validation source."""
    mask_prob: Probability | None = None
    """Share of the tokens to predict in evaluations, at most objective.mask_prob, which null takes: figures of runs
    that train with different shares can be compared."""
    continuations: Annotated[int, Field(ge=0, le=1000)] = 0
    """Held-out texts (those of the first validation source) whose first 16 tokens a causal model continues after each
    evaluation, in which a masked model fills two masks, and which a decoder restores from the corrupted tokens; for the
    log, TensorBoard and RUN/report.html."""
    prompts: list[str] = []
    """Texts that it continues, whose mask tokens it fills, or for which a decoder writes a target, before these."""
    continuation_tokens: SmallInt = 24
    """Most tokens of a continuation, at most data.seq_length - 1, or of a target, at most the longest of training; each
    costs the forward pass of a micro-batch."""
    continuation_temperature: NonNegativeFloat = 0.0
    """0 takes the most probable token, more draws one from softmax(logits / temperature), by seed, step and text."""
    downstream: list[DownstreamTask] = []
    """Tasks on which checkpoints are fine-tuned and judged (`downstream/TASK/METRIC` in the metrics)."""

    @property
    def continues(self) -> bool:
        """True if texts are continued."""
        return bool(self.continuations or self.prompts)

    @property
    def idle_settings(self) -> tuple[str, ...]:
        return () if self.continues else ("continuation_tokens", "continuation_temperature")
