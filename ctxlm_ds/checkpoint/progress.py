"""How far a run is, by its newest checkpoint, before it is started. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ctxlm_ds.checkpoint.fixed_settings import refuse_changed_settings
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, find_newest_intact, step_of
from ctxlm_ds.checkpoint.manifest import verify
from ctxlm_ds.checkpoint.saved_state import read_saved_state
from ctxlm_ds.recipe.load import load_saved_config
from ctxlm_ds.recipe.schema import RunConfig


@dataclass(frozen=True)
class Progress:
    """Where a start of a run would resume."""

    step: int
    max_steps: int
    complete: bool

    def describe(self) -> str:
        """Return `resumes at step 20 of 100`, or that there is nothing to train."""
        what = "complete already:" if self.complete else "resumes at"
        return f"{what} step {self.step:,} of {self.max_steps:,}"


def read_progress(run_dir: Path, config: RunConfig) -> Progress | None:
    """Return how far a run is; None without a checkpoint. Only the sizes of its files are compared, which is fast.

    Raises:
        CheckpointError: no checkpoint is intact, or the recipe changes what this run cannot change.
        ConfigError: the checkpoint's recipe is damaged.
    """
    newest = find_newest_intact(run_dir / CHECKPOINTS_DIR, partial(verify, quick=True), speaks=False).newest
    if newest is None:
        return None
    # Only a start finds out the sizes and digests of its inputs.
    saved = load_saved_config(newest / "config.yaml")
    if config.model.vocab_size is None:
        vocabulary = {"vocab_size": saved.model.vocab_size}
        config = config.model_copy(update={"model": config.model.model_copy(update=vocabulary)})
    if config.teacher.fingerprint is None:
        teacher = {"fingerprint": saved.teacher.fingerprint}
        config = config.model_copy(update={"teacher": config.teacher.model_copy(update=teacher)})
    refuse_changed_settings(newest, config)
    limits, step = config.training, step_of(newest)
    tokens = read_saved_state(newest).get("train_state", {}).get("tokens", 0)
    enough = limits.max_tokens is not None and tokens >= limits.max_tokens
    return Progress(step, limits.max_steps, step >= limits.max_steps or enough)
