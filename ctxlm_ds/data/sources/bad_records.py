"""Count the bad records of a run by reason, keep the first for the error file, and refuse more than a limit."""

from __future__ import annotations

import json
import logging
from collections import Counter
from typing import Any

from ctxlm_ds.data.sources.types import BadRecord
from ctxlm_ds.errors import DataError

logger = logging.getLogger("ctxlm_ds")

MAX_KEPT = 1000
_MAX_LOGGED = 10


class BadRecords:
    """Skipped records, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reasons: Counter[str] = Counter()
        self._kept: list[dict[str, Any]] = []

    @property
    def count(self) -> int:
        """Number of bad records."""
        return self.reasons.total()

    def add(self, bad: BadRecord, num_records: int) -> None:
        """Count one, found among `num_records` so far. Raises DataError if it is one too many."""
        self.reasons[bad.reason] += 1
        if self.count > self.limit:
            if not self.limit:
                raise DataError(f"{bad}; fix it, or let such records be skipped with --max-bad-records N")
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.reasons.most_common())
            raise DataError(
                f"{bad}; {self.count:,} of {num_records:,} records are no documents ({reasons}), "
                f"more than the {self.limit} allowed; fix them, or raise --max-bad-records"
            )
        if self.count <= _MAX_LOGGED:
            more = "; further ones are only counted" if self.count == _MAX_LOGGED else ""
            logger.warning("skipped: %s%s", bad, more)
        if self.count <= MAX_KEPT:
            self._keep(bad)

    def _keep(self, bad: BadRecord) -> None:
        self._kept.append(
            {
                "path": bad.path.encode("utf-8", "replace").decode("utf-8"),
                "position": bad.position,
                "unit": bad.unit,
                "reason": bad.reason,
                "detail": bad.detail.encode("utf-8", "replace").decode("utf-8"),
                "excerpt": bad.excerpt.decode("utf-8", "replace"),
            }
        )

    def error_lines(self) -> str:
        """Return the content of the error file: a JSON object per line; empty for none."""
        return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in self._kept)

    def to_json(self) -> dict[str, Any]:
        """Return the state that `restore` loads."""
        return {"reasons": dict(self.reasons), "kept": self._kept}

    def restore(self, value: dict[str, Any]) -> None:
        """Load the output of `to_json`."""
        self.reasons = Counter(value["reasons"])
        self._kept = value.get("kept", [])
