"""The job's decision table, row by row."""

from __future__ import annotations

import pytest

from ctxlm_ds.apps.cluster.job import Action, decide
from ctxlm_ds.apps.cluster.rank_start import Outcome

CALM = {
    "outcome": Outcome.FAILED, "still_ours": True, "time_is_up": False, "broken_nodes": False, "may_continue": True,
    "gives_up": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Action.RESTART),
        ({"time_is_up": True}, Action.CONTINUE_LATER),
        ({"broken_nodes": True}, Action.CONTINUE_LATER),
        ({"gives_up": True}, Action.GIVE_UP),
        ({"gives_up": True, "time_is_up": True}, Action.GIVE_UP),
        ({"still_ours": False}, Action.LEAVE),
        ({"may_continue": False}, Action.STOP),
        ({"outcome": Outcome.STOPPED}, Action.CONTINUE_LATER),
        ({"outcome": Outcome.STOPPED, "gives_up": True}, Action.GIVE_UP),
        ({"outcome": Outcome.STOPPED, "still_ours": False}, Action.LEAVE),
        ({"outcome": Outcome.STOPPED, "may_continue": False}, Action.STOP),
        ({"outcome": Outcome.COMPLETED}, Action.DONE),
        ({"outcome": Outcome.COMPLETED, "still_ours": False, "time_is_up": True}, Action.DONE),
        ({"outcome": Outcome.STOPPED_FOR_GOOD}, Action.DONE),
        ({"outcome": Outcome.USER_ERROR}, Action.STOP),
        ({"outcome": Outcome.USER_ERROR, "broken_nodes": True}, Action.STOP),
        ({"outcome": Outcome.TRAINING_ERROR, "time_is_up": True}, Action.STOP),
    ],
)
def test_the_table(changes: dict[str, object], expected: Action) -> None:
    assert decide(**{**CALM, **changes}) is expected  # type: ignore[arg-type]
