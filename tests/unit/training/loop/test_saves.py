"""When checkpoints are begun, completed and tried again, and when failing ones end the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.recipe.schema import CheckpointConfig
from ctxlm_ds.training.loop import saves as module
from ctxlm_ds.training.loop.saves import Saves
from ctxlm_ds.training.loop.state import TrainState
from tests.savers import RecordingSaver


class Course:
    """Steps of one rank, whose flags are everybody's."""

    def __init__(
        self, parts: int = 0, fails: Callable[[int], bool] = lambda step: False, keep: bool = True, **settings: float
    ) -> None:
        self.saved: list[int] = []
        self.phases: list[str] = []
        self.failures: list[int] = []
        self.saver = RecordingSaver(self.saved.append, parts, fails)
        self.keep = keep
        self.saves = Saves(CheckpointConfig(**settings), self.saver, self._record)
        self.state = TrainState()
        self.saves.start(0, self.phases.append)

    def _record(self, step: int, reason: str) -> bool:
        if self.keep:
            self.failures.append(step)
        return self.keep

    def go(self, steps: int) -> Course:
        for _ in range(steps):
            self.state.step += 1
            self.saves.agree(self.saves.flags())
            self.saves.after_step(self.state)
        return self


def test_a_save_takes_its_parts_at_the_ends_of_later_steps() -> None:
    course = Course(parts=2, interval_steps=4)
    assert course.go(4).saved == [] and course.saves.pending
    assert course.go(1).saved == []
    assert course.go(1).saved == [4] and not course.saves.pending
    assert course.go(2).saved == [4] and course.saves.pending
    assert course.phases == ["saving", "training"] * 4


def test_a_step_that_reached_a_number_of_words_is_saved() -> None:
    course = Course(interval_steps=100)
    course.state.reached_words = 1_000_000
    course.go(1).state.reached_words = 0
    assert course.go(50).saved == [1]


def test_while_a_rank_is_busy_the_others_wait_for_nothing() -> None:
    course = Course(parts=2, interval_steps=4).go(4)
    course.saver.busy = True
    course.go(3)
    assert course.saved == []
    # The next one is due: the pending one is waited for.
    course.go(8)
    assert course.saved == [4, 8]


def test_the_last_save_completes_the_pending_one_first() -> None:
    course = Course(parts=2, interval_steps=4).go(5)
    course.saves.last(course.state)
    assert course.saved == [4, 5]
    same = Course(parts=2, interval_steps=4).go(4)
    same.saves.last(same.state)
    assert same.saved == [4]


def test_settling_waits_and_a_rollback_moves_the_mark() -> None:
    course = Course(parts=2, interval_steps=4).go(5)
    assert (course.saves.pending_age_s() or -1.0) >= 0.0
    course.saves.settle()
    assert course.saves.pending_age_s() is None
    assert course.saved == [4] and not course.saves.pending
    course.state.step = 4
    course.saves.rolled_back(4)
    course.saves.last(course.state)
    assert course.saved == [4]
    assert course.go(4).saves.pending


def test_minutes_count_from_the_last_due_save(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    course = Course(interval_steps=1000, interval_minutes=1.0)
    assert course.go(3).saved == []
    now_s = 61.0
    assert course.go(3).saved == [4]
    now_s = 122.0
    assert course.go(1).saved == [4, 7]


def test_a_failed_save_is_tried_again_within_the_interval() -> None:
    full = {"until": 23}
    course = Course(parts=1, fails=lambda step: step < full["until"], interval_steps=20)
    course.go(22)
    assert course.saved == [] and course.failures == [20]
    # Found at step 21, so that after two steps more (a tenth of the interval) and one for its second part it is there.
    assert course.go(2).saved == [23]
    assert course.go(16).saves.pending and course.go(1).saved == [23, 40]


def test_a_minute_is_enough_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    course = Course(fails=lambda step: step == 1000, interval_steps=1000)
    course.go(1001)
    assert course.failures == [1000] and course.saved == [1001]


def test_only_due_saves_count_towards_the_limit() -> None:
    course = Course(fails=lambda step: True, interval_steps=20, max_failed_saves=2)
    course.go(59)
    assert course.failures == [20, 40]
    with pytest.raises(CheckpointError, match=r"3 due saves and \d\d tries in a row failed .*There is none yet"):
        course.go(1)


def test_one_that_succeeds_clears_the_count() -> None:
    course = Course(fails=lambda step: step in (4, 8, 16), interval_steps=4, max_failed_saves=2)
    course.saver.good = "step-0"
    course.go(40)
    assert course.failures == [4, 8, 16]
    assert {5, 9, 12, 17, 20} <= set(course.saved)


def test_no_failure_is_allowed_where_the_recipe_says_so() -> None:
    course = Course(fails=lambda step: step == 8, interval_steps=4, max_failed_saves=0)
    with pytest.raises(CheckpointError, match="step 8 could not be written.*last good checkpoint is step-4"):
        course.go(8)


def test_what_could_not_be_recorded_is_recorded_later() -> None:
    course = Course(fails=lambda step: step in (4, 8), interval_steps=4, keep=False)
    course.go(8)
    assert course.failures == []
    course.keep = True
    course.go(1)
    assert course.failures == [4, 8]


@pytest.mark.parametrize("failures", [2, 9])
def test_the_last_save_is_tried_several_times(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(module.time, "sleep", pauses.append)
    course = Course(fails=lambda step: step == 6 and len(pauses) < failures, interval_steps=4).go(6)
    if failures == 2:
        course.saves.last(course.state)
        assert course.saved == [4, 6] and len(pauses) == 2
        return
    with pytest.raises(CheckpointError, match="step 6 could not be written. The last good checkpoint is step-4"):
        course.saves.last(course.state)
    assert pauses == [1.0, 2.0, 4.0, 8.0] and course.failures == [6]
