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

    ended: Ended | None = None
    """Set if the ranks do not start at all."""
    exclude: tuple[str, ...] = ()
    """Nodes to avoid when the job is put back."""
    left_out: tuple[str, ...] = ()
    """Nodes of this allocation that the ranks do not use."""
    srun_words: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    """`a.b=c` for --set."""


class Action(Enum):
    """What to do next."""

    DONE = "done"
    STOP = "stop, with the ranks' status"
    LEAVE = "leave it to Slurm, which has ended or requeued the job"
    GIVE_UP = "give up"
    RESTART = "start again in this allocation"
    CONTINUE_LATER = "put the job back into the queue"


@dataclass(frozen=True)
class Situation:
    """The facts that the decision depends on."""

    outcome: Outcome
    still_ours: bool
    """False if the job has been cancelled or requeued already."""
    time_is_up: bool
    """The job itself was asked to stop (ahead of its limit, preemption), or too little time is left."""
    broken_nodes: bool
    fruitless_starts: int
    max_restarts: int
    may_continue: bool
    """CTXLM_RESTART is not off."""


def decide(situation: Situation) -> Action:
    """Return the action of the first row that fits."""
    outcome = situation.outcome
    if outcome in (Outcome.COMPLETED, Outcome.STOPPED_FOR_GOOD):
        return Action.DONE
    if not situation.still_ours:
        return Action.LEAVE
    if outcome in (Outcome.USER_ERROR, Outcome.TRAINING_ERROR) or not situation.may_continue:
        return Action.STOP
    if situation.fruitless_starts >= situation.max_restarts:
        return Action.GIVE_UP
    if outcome is Outcome.STOPPED or situation.time_is_up or situation.broken_nodes:
        return Action.CONTINUE_LATER
    return Action.RESTART
