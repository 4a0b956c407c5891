"""RUN/attempts/ATTEMPT/rank-00003.json: how one rank ended, for the job that started it and for people.

Needs no torch: what reads them may run on a machine that has none.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ctxlm_ds.atomic import write_text

RECORD_GLOB = "rank-*.json"

_SOURCE_PLACE = re.compile(r"\[\S+:\d+\] ")


@dataclass(frozen=True)
class FailureRecord:
    """How one rank ended."""

    time_unix_s: float
    rank: int
    host: str
    exit_status: int
    error: str
    """The exception's type."""
    message: str
    traceback: str | None = None
    """None for a user's mistake, which has none worth reading."""
    consequence: bool = False
    """Another rank's end brought this one down: look there for the reason."""


def shortened(text: str, most_characters: int) -> str:
    """An error's message as one line, without the place in C++ sources that torch's begin with."""
    line = _SOURCE_PLACE.sub("", " ".join(text.split()))
    return line if len(line) <= most_characters else line[: most_characters - 1] + "…"


def record_name(rank: int) -> str:
    """`3` -> `rank-00003.json`."""
    return f"rank-{rank:05d}.json"


def read_failures(folder: Path) -> list[FailureRecord]:
    """The records of one attempt, the likely reason first: causes before consequences, each by time.

    Damaged records are passed over; a folder that is not there has none.
    """
    records = [record for path in sorted(folder.glob(RECORD_GLOB)) if (record := read_record(path)) is not None]
    return sorted(records, key=lambda record: (record.consequence, record.time_unix_s))


def read_record(path: Path) -> FailureRecord | None:
    """One record; None where it is missing or damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name for field in fields(FailureRecord)}
        record = FailureRecord(**{name: value for name, value in values.items() if name in known})
        return record if float(record.time_unix_s) >= 0 else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def write_record(folder: Path, record: FailureRecord) -> bool:
    """Write it; False where the disk is full or gone."""
    try:
        write_text(folder / record_name(record.rank), json.dumps(asdict(record), indent=1) + "\n")
    except OSError:
        return False
    return True


def clear_evidence(folder: Path, before_unix_s: float) -> None:
    """Remove what an earlier start left in the same folder, which only starts by hand share."""
    for path in [*folder.glob(RECORD_GLOB), *folder.glob("*stacks*.txt")]:
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < before_unix_s:
                path.unlink()
