"""Count the bad records of a run by reason, keep a sample for the error file, and refuse more than a limit."""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
from collections import Counter
from typing import Any

from ctxlm_ds.data.preprocess.config import MIN_RECORDS_FOR_SHARE
from ctxlm_ds.data.sources.types import BadRecord
from ctxlm_ds.errors import DataError

logger = logging.getLogger("ctxlm_ds")

MAX_SAMPLED = 1000
_MAX_LOGGED = 10


class BadRecords:
    """Skipped records. The sample is those with the smallest hashes, so that it depends on the records only."""

    def __init__(self, limit: int | float) -> None:
        self.limit = limit
        """Records (int), or a share of all records (float)."""
        self.reasons: Counter[str] = Counter()
        self._sample: list[tuple[str, dict[str, Any]]] = []
        """A heap whose first item has the largest hash (hashes are stored inverted)."""

    @property
    def count(self) -> int:
        return self.reasons.total()

    def add(self, bad: BadRecord, records: int) -> None:
        """Count one, found among `records` so far. Raises DataError if it is one too many."""
        self.reasons[bad.reason] += 1
        is_share = isinstance(self.limit, float)
        is_judged = records >= MIN_RECORDS_FOR_SHARE or not is_share
        if is_judged and self.count > self.limit * (records if is_share else 1):
            raise DataError(self._refusal(str(bad), records))
        if self.count <= _MAX_LOGGED:
            more = "; further ones are only counted" if self.count == _MAX_LOGGED else ""
            logger.warning("skipped: %s%s", bad, more)
        self._keep(bad)

    def check(self, records: int) -> None:
        """Raise DataError if, at the end, the share is too large."""
        if isinstance(self.limit, float) and self.count > self.limit * records:
            raise DataError(self._refusal("all input is read", records))

    def _refusal(self, where: str, records: int) -> str:
        if not self.limit:
            return f"{where}; fix it, or let such records be skipped with --max-bad-records N"
        allowed = f"{100 * self.limit:.4g} %" if isinstance(self.limit, float) else str(self.limit)
        found = f"{self.count:,} of {records:,} records are no documents ({self.summary()})"
        return f"{where}; {found}, more than the {allowed} allowed; fix them, or raise --max-bad-records"

    def summary(self) -> str:
        """Return the counts as text: `3 missing key, 1 invalid JSON`."""
        return ", ".join(f"{count:,} {reason}" for reason, count in self.reasons.most_common())

    def _keep(self, bad: BadRecord) -> None:
        place = f"{bad.path}\0{bad.unit}\0{bad.position}"
        digest = hashlib.sha256(place.encode("utf-8", "surrogateescape")).digest()
        entry = {
            "path": bad.path.encode("utf-8", "replace").decode("utf-8"),
            "position": bad.position,
            "unit": bad.unit,
            "reason": bad.reason,
            "detail": bad.detail.encode("utf-8", "replace").decode("utf-8"),
            "excerpt": bad.excerpt.decode("utf-8", "replace"),
        }
        item = (bytes(255 - byte for byte in digest).hex(), entry)
        if len(self._sample) < MAX_SAMPLED:
            heapq.heappush(self._sample, item)
        elif item[0] > self._sample[0][0]:
            heapq.heapreplace(self._sample, item)

    def error_lines(self) -> str:
        """Return the content of the error file: a JSON object per line, in order of position; empty for none."""
        entries = sorted((entry for _, entry in self._sample), key=lambda entry: (entry["path"], entry["position"]))
        return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)

    def to_json(self) -> dict[str, Any]:
        return {"reasons": dict(self.reasons), "sample": self._sample}

    def restore(self, value: dict[str, Any]) -> None:
        """Load the output of `to_json`."""
        self.reasons = Counter(value["reasons"])
        self._sample = [(digest, entry) for digest, entry in value["sample"]]
        heapq.heapify(self._sample)
