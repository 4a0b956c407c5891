"""What counts as a spike, what follows an anomaly, and that a restart decides alike."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import NoReturn

import pytest

from ctxlm_ds.recipe.check import unused_settings
from ctxlm_ds.recipe.schema import AnomaliesConfig, RunConfig
from ctxlm_ds.training.loop.recovery import Recovery
from ctxlm_ds.training.loop.state import Anomaly, TrainState

WINDOW = 8
NAN = Anomaly("non_finite", "the loss of step 9 is nan")


def not_called(*_: object) -> NoReturn:
    raise AssertionError("nothing goes back here")


def recovery(**changes: object) -> Recovery:
    config = AnomaliesConfig(**{"spike": "skip", "spike_window_steps": WINDOW, **changes})
    return Recovery(config, Path(), None, not_called, not_called)


def filled(detector: Recovery, losses: list[float]) -> TrainState:
    state = TrainState()
    for loss in losses:
        detector.note_good(state, loss)
        state.step += 1
    return state


def test_a_spike_is_so_many_standard_deviations_above_the_mean() -> None:
    detector = recovery(spike_threshold=3.0)
    losses = [5.0, 4.8, 5.1, 4.9, 5.3, 4.7, 5.0, 5.2]
    state = filled(detector, losses)
    limit = statistics.fmean(losses) + 3.0 * statistics.pstdev(losses)
    assert detector.find_spike(state, limit - 1e-6) is None
    found = detector.find_spike(state, limit + 1e-6)
    assert found is not None
    assert found.kind == "spike"
    assert "the loss of step 9 is" in found.why
    assert "more than 3 standard deviations" in found.why
    assert detector.find_spike(state, -100.0) is None, "a low loss"


def test_nothing_is_a_spike_before_the_window_is_full() -> None:
    detector = recovery()
    state = filled(detector, [1.0] * (WINDOW - 1))
    assert detector.find_spike(state, 1e9) is None
    detector.note_good(state, 1.0)
    assert detector.find_spike(state, 1e9) is not None


def test_a_run_that_ignores_spikes_keeps_no_losses() -> None:
    detector = recovery(spike="ignore")
    state = filled(detector, [1.0] * 20)
    assert state.recent_losses == []
    assert detector.find_spike(state, 1e9) is None


def test_so_many_skips_in_a_row_and_no_more() -> None:
    detector = recovery(non_finite="skip", max_skips=3)
    assert detector.decide(TrainState(skips_in_a_row=2), NAN)[0] == "skip"
    action, why = detector.decide(TrainState(skips_in_a_row=3), NAN)
    assert action == "stop"
    assert "3 steps in a row were skipped before it (anomalies.max_skips)" in why


@pytest.mark.parametrize("limit", [0, 2])
def test_so_many_rollbacks_and_no_more(limit: int) -> None:
    detector = recovery(non_finite="rollback", max_rollbacks=limit)
    if limit:
        assert detector.decide(TrainState(rollbacks=limit - 1), NAN)[0] == "rollback"
    action, why = detector.decide(TrainState(rollbacks=limit), NAN)
    assert action == "stop"
    assert f"went back {limit} times before it (anomalies.max_rollbacks)" in why


def test_limits_without_effect_are_told() -> None:
    config = RunConfig(anomalies=AnomaliesConfig(max_skips=2, spike_threshold=3.0))
    told = "\n".join(unused_settings(config))
    assert "anomalies.max_skips: 2" in told
    assert "anomalies.spike_threshold: 3.0" in told
    used = RunConfig(anomalies=AnomaliesConfig(spike="skip", max_skips=2, spike_threshold=3.0))
    assert not [line for line in unused_settings(used) if "anomalies" in line]
