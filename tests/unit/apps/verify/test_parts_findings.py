"""The table of findings and its JSON."""

from __future__ import annotations

from ctxlm_ds.apps.verify.parts import CHECKED, PROVED, WRONG, Finding, as_dict, table

FINDINGS = [Finding("recipe", CHECKED, "valid\nfor 8 ranks"), Finding("model", PROVED, "word " * 30)]


def test_texts_are_wrapped_below_each_other() -> None:
    lines = table(FINDINGS, 70)
    assert lines[0].split() == ["recipe", "checked", "valid"] and lines[1].split() == ["for", "8", "ranks"]
    assert lines[0].index("valid") == lines[1].index("for")
    assert all(len(line) <= 70 for line in lines)
    assert " ".join(lines[2:]).split() == ["model", "proved", *["word"] * 30]


def test_json_says_whether_something_is_wrong() -> None:
    assert as_dict(FINDINGS)["wrong"] is False
    found = as_dict([*FINDINGS, Finding("memory", WRONG, "too much")])
    assert found["wrong"] is True and found["findings"][2] == {"part": "memory", "state": WRONG, "text": "too much"}
