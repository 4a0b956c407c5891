"""How a start ended, by what its ranks left in the run directory; srun's status is the last to be asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxlm_ds.cluster.attempts import newest_checkpoint
from ctxlm_ds.cluster.decide import Ended, Outcome
from ctxlm_ds.cluster.evidence import RankFailure
from ctxlm_ds.errors import EXIT_TRAINING_ERROR, EXIT_USER_ERROR
from ctxlm_ds.process.run_history import END, read_history
from ctxlm_ds.process.run_lock import LOCK_NAME

# Deadly to a rank that is still importing, and to an srun that has hardly begun.
STOP_SIGNALS = (10, 12, 15)


def read_outcome(
    run_dir: Path,
    history_length: int,
    status: int,
    failures: Sequence[RankFailure],
    max_steps: int,
    job_ids: Sequence[str],
    told_to_stop: bool,
) -> Ended:
    """Judge a start.

    Args:
        run_dir: the run's folder.
        history_length: events in its history when the start began.
        status: srun's exit status; negative where a signal ended srun.
        failures: of its ranks, the first cause first.
        max_steps: the recipe's; decides where a full disk has lost the END event.
        job_ids: ids under which this job, or what it succeeds, has held the run's lock.
        told_to_stop: the ranks were sent a signal to stop.
    """
    ends = [event for event in read_history(run_dir)[history_length:] if event["event"] == END]
    if ends and not ends[-1].get("failed", False):
        return _ended_in_order(ends[-1])
    if status == 0 and not failures:
        done = (newest_checkpoint(run_dir) or 0) >= max_steps
        return Ended(Outcome.COMPLETED if done else Outcome.STOPPED, "no end is on record", 0)
    first = failures[0] if failures else None
    exit_status = first.exit_status if first is not None and first.exit_status is not None else abs(status) or 1
    why = first.describe() if first is not None else _status_in_words(status)
    if told_to_stop and (status < 0 or (first is not None and first.signal in STOP_SIGNALS)):
        return Ended(Outcome.STOPPED, f"told to stop before it could ({why})", exit_status)
    if first is not None and first.error == "RunLockedError" and _lock_holder(run_dir) in job_ids:
        return Ended(Outcome.FAILED, f"an earlier start of this job still holds {run_dir}: {why}", exit_status)
    outcomes = {EXIT_USER_ERROR: Outcome.USER_ERROR, EXIT_TRAINING_ERROR: Outcome.TRAINING_ERROR}
    return Ended(outcomes.get(exit_status, Outcome.FAILED), why, exit_status)


def _ended_in_order(end: dict[str, Any]) -> Ended:
    reason = str(end.get("reason", ""))
    if end.get("completed"):
        return Ended(Outcome.COMPLETED, reason, 0)
    return Ended(Outcome.STOPPED_FOR_GOOD if "SIGINT" in reason else Outcome.STOPPED, reason, 0)


def _status_in_words(status: int) -> str:
    return f"srun ended by signal {-status}" if status < 0 else f"srun ended with status {status}"


def _lock_holder(run_dir: Path) -> str | None:
    try:
        record = json.loads((run_dir / LOCK_NAME).read_text(encoding="utf-8"))
        return str(record["job_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
