"""A table as text and as Markdown."""

from __future__ import annotations

from tools.benchmark.tables import Table

TABLE = Table("a run", ("", "speed", "memory"), [["ours", "12", "3 MB"], ["their model", "4", "10 MB"]], ["A note."])


def test_text_is_aligned() -> None:
    assert list(TABLE.text()) == [
        "a run",
        "               speed  memory",
        "  ours            12    3 MB",
        "  their model      4   10 MB",
        "  A note.",
    ]


def test_markdown() -> None:
    assert list(TABLE.markdown()) == [
        "**a run**",
        "",
        "|  | speed | memory |",
        "| --- | ---: | ---: |",
        "| ours | 12 | 3 MB |",
        "| their model | 4 | 10 MB |",
        "",
        "A note.",
    ]
