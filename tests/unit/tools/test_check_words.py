"""tools/check_words.py finds words in what people read, with the line and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_words

PYTHON = '''"""The whole first line.

A second, anew.
"""
whole = "begin anew"  # mend this
'''
PAGE = """The whole page, whole words, `whole`.

    whole code

```
whole code
```
It is told of.
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    return tmp_path


def test_docstrings_strings_and_comments_and_no_code(root: Path) -> None:
    (root / "a.py").write_text(PYTHON)
    assert check_words.find_words(root / "a.py") == [
        'a.py:1: "whole": write complete, full, entire',
        'a.py:3: "anew": write again, from scratch',
        'a.py:5: "anew": write again, from scratch',
        'a.py:5: "mend": write fix',
    ]


def test_pages_without_their_code(root: Path) -> None:
    (root / "a.md").write_text(PAGE)
    assert check_words.find_words(root / "a.md") == [
        'a.md:1: "whole": write complete, full, entire', 'a.md:8: "told of": write report, log, show',
    ]  # fmt: skip


def test_folders_are_searched_and_other_files_passed_over(root: Path) -> None:
    for name in ("b/c.py", "b/d.md", "b/e.txt", "f.py"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).touch()
    found = [path.relative_to(root).as_posix() for path in check_words.files_below(["b", "f.py"])]
    assert found == ["b/c.py", "b/d.md", "f.py"]
