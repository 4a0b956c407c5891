"""What a job does when its ranks have ended: the whole table on one screen. Pure: no Slurm, no files."""

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
    """A start's outcome, in words too, and the status that tells it best."""

    outcome: Outcome
    why: str
    exit_status: int


@dataclass(frozen=True)
class Prepared:
    """What the checks ahead of the ranks found, for all starts in this allocation."""

    ended: Ended | None = None
    """Why the ranks do not start at all."""
    exclude: tuple[str, ...] = ()
    """Nodes to keep away from when the job is put back."""
    left_out: tuple[str, ...] = ()
    """Nodes of this allocation that the ranks do without."""
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
    """What the decision rests on."""

    outcome: Outcome
    still_ours: bool
    """False where the job has been cancelled or requeued already: whoever did that has decided."""
    time_is_up: bool
    """The job itself was told to stop (ahead of its limit, preemption), or too little time is left."""
    broken_nodes: bool
    fruitless_starts: int
    max_restarts: int
    may_continue: bool
    """CTXLM_RESTART is not off."""


def decide(situation: Situation) -> Action:
    """The first row that fits."""
    outcome = situation.outcome
    if outcome in (Outcome.COMPLETED, Outcome.STOPPED_FOR_GOOD):
        return Action.DONE
    if not situation.still_ours:
        return Action.LEAVE
    if outcome in (Outcome.USER_ERROR, Outcome.TRAINING_ERROR):
        return Action.STOP
    if not situation.may_continue:
        return Action.STOP
    if situation.fruitless_starts >= situation.max_restarts:
        return Action.GIVE_UP
    if outcome is Outcome.STOPPED or situation.time_is_up or situation.broken_nodes:
        return Action.CONTINUE_LATER
    return Action.RESTART
