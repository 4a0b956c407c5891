"""What a job does when its ranks have ended: the decision table, without Slurm and files."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """How a start ended, by what the ranks left in the run directory."""

    COMPLETED = "completed"
    STOPPED = "stopped in order"
    STOPPED_FOR_GOOD = "stopped by an interrupt"
    USER_ERROR = "a user's error"
    TRAINING_ERROR = "a training error"
    FAILED = "failed"


@dataclass(frozen=True)
class Ended:
    """The outcome of one start, its reason, and the exit status to return."""

    outcome: Outcome
    why: str
    exit_status: int

    def describe(self) -> str:
        """Describe the outcome and its reason."""
        return f"{self.outcome.value}: {self.why}"


@dataclass(frozen=True)
class Prepared:
    """Results of the checks before the ranks, for all starts in this allocation."""

    ended: Ended | None = None  # set if the ranks do not start at all
    exclude: tuple[str, ...] = ()  # nodes to avoid when the job is put back
    left_out: tuple[str, ...] = ()  # nodes of this allocation that the ranks do not use
    srun_words: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()  # `a.b=c` for --set


class Action(Enum):
    """What to do next."""

    DONE = "done"
    STOP = "stop, with the ranks' status"
    LEAVE = "leave it to Slurm, which has ended or requeued the job"
    GIVE_UP = "give up"
    RESTART = "start again in this allocation"
    CONTINUE_LATER = "put the job back into the queue"


def decide(
    outcome: Outcome,
    *,
    still_ours: bool,
    time_is_up: bool,
    broken_nodes: bool,
    may_continue: bool,
    fruitless_starts: int,
    max_restarts: int,
) -> Action:
    """Return the action of the first row that fits.

    Args:
        outcome: of the start.
        still_ours: the job has been neither cancelled nor requeued.
        time_is_up: the job itself was asked to stop (ahead of its limit, preemption), or too little time is left.
        broken_nodes: a node of the ranks is down.
        may_continue: CTXLM_RESTART is not off.
        fruitless_starts: number of starts in a row without progress, this one included.
        max_restarts: number of such starts at which the job gives up.
    """
    if outcome in (Outcome.COMPLETED, Outcome.STOPPED_FOR_GOOD):
        return Action.DONE
    if not still_ours:
        return Action.LEAVE
    if outcome in (Outcome.USER_ERROR, Outcome.TRAINING_ERROR) or not may_continue:
        return Action.STOP
    if fruitless_starts >= max_restarts:
        return Action.GIVE_UP
    if outcome is Outcome.STOPPED or time_is_up or broken_nodes:
        return Action.CONTINUE_LATER
    return Action.RESTART
