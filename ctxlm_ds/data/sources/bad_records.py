"""Count the bad records of a run by reason, keep a sample for the error file, and refuse more than a limit."""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import re
from collections import Counter
from typing import Any

from ctxlm_ds.data.sources.types import BadRecord
from ctxlm_ds.errors import DataError

logger = logging.getLogger("ctxlm_ds")

MAX_SAMPLED = 1000
MIN_RECORDS_FOR_SHARE = 10_000
"""A share of bad records is judged after this many records, and at the end."""
_MAX_LOGGED = 10


def parse_max_bad_records(text: str) -> int | float:
    """`10` -> 10, `1%` -> 0.01. Raises DataError for anything else."""
    match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)%", text.strip())
    if match is None or (match[2] and float(match[2]) > 100):
        raise DataError(f"--max-bad-records {text}: a number of records (10) or a share of them (1%) is needed")
    return int(match[1]) if match[1] else float(match[2]) / 100


class BadRecords:
    """Skipped records. The sample is those with the smallest hashes, so that it depends on the records only.

    Args:
        limit: records (int), or a share of all records (float), that may be skipped.
    """

    def __init__(self, limit: int | float) -> None:
        self.limit = limit
        self.reasons: Counter[str] = Counter()
        self._sample: list[tuple[str, dict[str, Any]]] = []
        """A heap whose first item has the largest hash (hashes are stored inverted)."""

    @property
    def count(self) -> int:
        """Number of bad records."""
        return self.reasons.total()

    def add(self, bad: BadRecord, num_records: int) -> None:
        """Count one, found among `num_records` so far. Raises DataError if it is one too many."""
        self.reasons[bad.reason] += 1
        if num_records >= MIN_RECORDS_FOR_SHARE or not isinstance(self.limit, float):
            self._refuse_too_many(str(bad), num_records)
        if self.count <= _MAX_LOGGED:
            more = "; further ones are only counted" if self.count == _MAX_LOGGED else ""
            logger.warning("skipped: %s%s", bad, more)
        self._keep(bad)

    def check(self, num_records: int) -> None:
        """Raise DataError if, at the end, there are too many."""
        self._refuse_too_many("all input is read", num_records)

    def _refuse_too_many(self, where: str, num_records: int) -> None:
        is_share = isinstance(self.limit, float)
        if self.count <= self.limit * (num_records if is_share else 1):
            return
        if not self.limit:
            raise DataError(f"{where}; fix it, or let such records be skipped with --max-bad-records N")
        allowed = f"{100 * self.limit:.4g} %" if is_share else str(self.limit)
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.reasons.most_common())
        raise DataError(
            f"{where}; {self.count:,} of {num_records:,} records are no documents ({reasons}), "
            f"more than the {allowed} allowed; fix them, or raise --max-bad-records"
        )

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
        """Return the state that `restore` loads."""
        return {"reasons": dict(self.reasons), "sample": self._sample}

    def restore(self, value: dict[str, Any]) -> None:
        """Load the output of `to_json`."""
        self.reasons = Counter(value["reasons"])
        self._sample = [(digest, entry) for digest, entry in value["sample"]]
        heapq.heapify(self._sample)
