"""A table as text and as Markdown."""

from __future__ import annotations

from tools.benchmark.tables import Table, spread

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


def test_spread() -> None:
    assert spread([3.0, 1.0, 2.5], "{:.1f}") == "2.5 (1.0 to 3.0)"
