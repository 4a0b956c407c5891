"""Count the bad records of a run by reason, keep the first for the error file, and refuse more than a limit."""

from __future__ import annotations

import json
import logging
import shlex
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ctxlm_ds.data.sources.types import NOT_UTF8, BadRecord
from ctxlm_ds.errors import DataError

logger = logging.getLogger("ctxlm_ds")

MAX_KEPT = 1000
_MAX_LOGGED = 10
_COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def remedy(bad: BadRecord) -> str:
    """Return how a file of another encoding is converted; nothing for other bad records."""
    if bad.reason != NOT_UTF8 or bad.unit != "line":
        return ""
    is_utf16 = bad.position == 1 and bad.excerpt.startswith(_UTF16_MARKS)
    found, encoding = ("the file is UTF-16", "UTF-16") if is_utf16 else ("if its encoding is another", "ISO-8859-2")
    example = "" if is_utf16 else "e.g. "
    file = "FILE, unpacked" if bad.path.endswith(_COMPRESSED) else shlex.quote(bad.path)
    return f"{found}: convert it, {example}iconv -f {encoding} -t UTF-8 {file}"


def unreadable_text(reasons: Mapping[str, int], num_records: int) -> str:
    """Return the sentence about an input of which no record is a document."""
    which = f"all {num_records:,} records were" if num_records > 1 else "the only record was"
    return f"{which} unreadable ({', '.join(f'{count:,} {reason}' for reason, count in reasons.items())})"


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
                fix = remedy(bad) or "fix it"
                raise DataError(f"{bad}; {fix}, or skip such records with --max-bad-records N")
            raise DataError(
                f"{bad}; {self.count:,} of {num_records:,} records are no documents ({self.by_reason()}), "
                f"more than the {self.limit} allowed; {remedy(bad) or 'fix them'}, or raise --max-bad-records"
            )
        if self.count <= _MAX_LOGGED:
            more = "; further ones are only counted" if self.count == _MAX_LOGGED else ""
            logger.warning("skipped: %s%s", bad, more)
        if self.count <= MAX_KEPT:
            self._keep(bad)

    def by_reason(self) -> str:
        """Return the number of records for each reason, in words."""
        return ", ".join(f"{count:,} {reason}" for reason, count in self.reasons.most_common())

    def all_unreadable(self, num_records: int) -> str:
        """Return a sentence if none of the records that were read is a document, else nothing."""
        if not self.count or self.count < num_records:
            return ""
        return unreadable_text(self.reasons, num_records)

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
