"""`make bench` replaces what is between its markers and nothing else; the document of the project has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.errors import ConfigError
from tools.benchmark.document import PLACES, check_document, describe_machine, replaced, write_tables
from tools.benchmark.tables import Table

TEXT = """# A title

<!-- begin steps-512 -->
old
<!-- end steps-512 -->
between
<!-- begin packing -->

old

<!-- end packing -->

end
"""


def test_the_document_of_the_project_has_every_place() -> None:
    check_document(Path(__file__).resolve().parents[4] / "docs" / "benchmarks.md")


def test_only_what_is_between_the_markers_changes(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.md"
    path.write_text(TEXT)
    table = Table("a run", ("", "speed"), [["ours", "1"]])
    for _ in range(2):  # a second time writes the same
        write_tables(path, "packing", [table, table], "a machine.")
        rows = "**a run**\n\n|  | speed |\n| --- | ---: |\n| ours | 1 |"
        new = f"<!-- begin packing -->\n\na machine.\n\n{rows}\n\n{rows}\n\n<!-- end packing -->"
        begin, end = TEXT.index("<!-- begin packing"), TEXT.index("<!-- end packing -->")
        assert path.read_text() == TEXT[:begin] + new + TEXT[end + len("<!-- end packing -->") :]


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        "<!-- begin packing -->",
        "<!-- end packing -->\n<!-- begin packing -->",
        "<!-- begin packing -->\n<!-- begin packing -->\n<!-- end packing -->",
    ],
)
def test_a_place_has_one_pair_of_markers(text: str) -> None:
    with pytest.raises(ConfigError, match="notes.md needs one line <!-- begin packing -->"):
        replaced(text, {"packing": "new"}, "notes.md")


def test_a_document_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        check_document(tmp_path / "none.md", PLACES)


def test_the_machine_is_described() -> None:
    text = describe_machine()
    assert "torch 2" in text and "deepspeed 0" in text and text.endswith(".")
