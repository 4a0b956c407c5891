"""The progress of a run, as checkpoints hold it."""

from __future__ import annotations

from ctxlm_ds.training.loop.state import TrainState


def test_checkpoints_without_these_fields_are_read() -> None:
    old = {"step": 4, "rows_consumed": 32, "tokens": 9, "skipped_steps": 1, "seconds": 2.0}
    state = TrainState.from_dict(old)
    assert (state.skips_in_a_row, state.rollbacks, state.recent_losses) == (0, 0, [])


def test_a_phase_plans_a_decay_by_wall_time_again() -> None:
    begun = TrainState(step=11, seconds=9.0, decay=[7, 11]).begin_phase(1, continues=True)
    assert (begun.decay, begun.first_step, begun.first_seconds) == ([], 11, 9.0)
