"""The starts of a run and how each ended, put together from its history and what failing ranks left.

In: events of RUN/history.jsonl, RUN/attempts. Out: a Start each, oldest first. Needs neither torch nor numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxlm_ds.cluster.attempts import CANCELLED, Attempt
from ctxlm_ds.cluster.run_files import STACKS_NAME, attempt_failures
from ctxlm_ds.process.failure_records import FailureRecord, shortened
from ctxlm_ds.process.run_history import ATTEMPTS_DIR, DEFAULT_ATTEMPT, END, FAILURE, GIVE_UP, REQUEUE, START

SHOWN_CHARACTERS = 200
NO_WORD = "ended without a word (killed, or its node was lost)"


@dataclass(frozen=True)
class Start:
    """One start of a run's ranks that came as far as training."""

    time_unix_s: float
    step: int
    last_step: int | None
    attempt: str
    log: str | None
    ended: str
    """How it ended, in words; of the last start, how it would have if it has."""


def list_starts(run_dir: Path, events: Sequence[dict[str, Any]]) -> list[Start]:
    """Every start, oldest first."""
    begins = [index for index, event in enumerate(events) if event["event"] == START]
    return [
        _start(run_dir, events[begin:end], seconds(events[end]) if end < len(events) else math.inf)
        for begin, end in zip(begins, [*begins[1:], len(events)])  # noqa: B905 (Python 3.9 runs this on login nodes)
    ]


def _start(run_dir: Path, events: Sequence[dict[str, Any]], next_s: float) -> Start:
    """A start from its event and those up to the next one's, which came at `next_s`."""
    first = events[0]
    attempt = str(first.get("attempt") or DEFAULT_ATTEMPT)
    records = attempt_failures(run_dir, attempt)
    # Starts by hand share a folder.
    own = [record for record in records if seconds(first) <= record.time_unix_s < next_s]
    return Start(
        time_unix_s=seconds(first),
        step=first["step"] if isinstance(first.get("step"), int) else 0,
        last_step=first["last_step"] if isinstance(first.get("last_step"), int) else None,
        attempt=attempt,
        log=str(first["log"]) if first.get("log") else _output(run_dir, attempt),
        ended=_end_in_words(run_dir / ATTEMPTS_DIR / attempt, own, events[1:]),
    )


def _end_in_words(folder: Path, records: Sequence[FailureRecord], after: Sequence[dict[str, Any]]) -> str:
    """What the job says of the end, else the ranks' records, else rank 0 at its end."""
    told = [event for event in after if event["event"] in (FAILURE, REQUEUE) and event.get("attempt") == folder.name]
    gave_up = any(event["event"] == GIVE_UP for event in after)
    requeued = any(event["event"] == REQUEUE for event in told)
    cancelled = any(is_cancelled_in_order(event) for event in told)
    tail = "; the job gave up" if gave_up else "; requeued" if requeued else "; cancelled" if cancelled else ""
    end = next((event for event in after if event["event"] == END), None)
    if told:
        return one_line(str(told[0].get("why") or "failed")) + tail
    if end is not None and not end.get("failed"):
        return one_line(str(end.get("reason"))) + tail
    if records:
        where = f" ({folder / STACKS_NAME})" if records[0].error == "Hang" else ""
        return one_line(describe_failure(records[0])) + where + tail
    return (one_line(str(end.get("reason"))) if end is not None else NO_WORD) + tail


def is_cancelled_in_order(event: dict[str, Any]) -> bool:
    """Whether a job tells that a person ended it, and its ranks had saved and stopped by themselves."""
    return event["event"] == FAILURE and event.get("how") == CANCELLED and event.get("exit_status") == 0


def newest_log(run_dir: Path, starts: Sequence[Start], begun: Attempt | None) -> str | None:
    """Where the newest start writes, `begun` being one that may not have come as far as training."""
    last = starts[-1] if starts else None
    if begun is None or (last is not None and (last.attempt == begun.name or last.time_unix_s > begun.time_unix_s)):
        return last.log if last is not None else None
    return begun.log or _output(run_dir, begun.name)


def describe_failure(record: FailureRecord) -> str:
    """Rank, host and error."""
    return f"rank {record.rank} on {record.host}: {record.error}: {record.message}"


def _output(run_dir: Path, attempt: str) -> str | None:
    path = run_dir / ATTEMPTS_DIR / attempt / "output.log"
    return str(path) if path.is_file() else None


def seconds(event: dict[str, Any]) -> float:
    """When an event was."""
    value = event.get("time_unix_s")
    return float(value) if isinstance(value, (int, float)) else 0.0


def one_line(text: str) -> str:
    """Whatever an error said, short."""
    return shortened(text, SHOWN_CHARACTERS)
