"""What `ctxlm verify` found: one line for each part of a run, and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from ctxlm_ds.console import aligned

PROVED = "proved"
"""The thing itself ran or was compiled here."""
CHECKED = "checked"
"""A calculation, or sizes and fingerprints."""
NOT_CHECKED = "not checked"
ONLY_A_DEVICE = "only a device"
WRONG = "WRONG"
LEAST_TEXT = 40
"""Characters of a line of a text, however narrow the terminal."""
STATES = (PROVED, CHECKED, NOT_CHECKED, ONLY_A_DEVICE, WRONG)


@dataclass(frozen=True)
class Finding:
    """What was found of one part of a run."""

    part: str
    state: str
    """One of STATES."""
    text: str


def table(findings: Sequence[Finding], columns: int = 100) -> list[str]:
    """Return the findings as lines of a table, their texts wrapped to the columns of a terminal."""
    names = max(len(finding.part) for finding in findings) + max(map(len, STATES))
    width = max(LEAST_TEXT, columns - names - len("      "))
    lines = []
    for finding in findings:
        wrapped = [part for line in finding.text.splitlines() for part in wrap(line, width, subsequent_indent="  ")]
        lines += [(finding.part, finding.state, wrapped[0]), *(("", "", part) for part in wrapped[1:])]
    return aligned(lines, (0, 1, 2))


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings for --json."""
    return {"wrong": any(finding.state == WRONG for finding in findings), "findings": list(map(asdict, findings))}
