"""The embedded corpus: what is kept of a docstring, that nothing is imported, and the tool that writes it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from ctxlm_ds.apps.text import extract_docstrings as docstrings
from ctxlm_ds.apps.text.extract_docstrings import extract_docstrings, is_held_out, module_prose, prose_paragraphs
from ctxlm_ds.errors import DataError

SAMPLE = """
Return the mean of the given values, which
may be of any numeric type.

.. versionadded:: 1.9

The result is computed as follows::

    total = 0
    for value in values: total += value and so on until the very end of it.

A second paragraph uses ``literal`` text and a :func:`~package.role` in it.

Parameters
----------
values : array_like of shape (n, m)
    The values that are to be averaged over all axes.
axis, other : int
    short

Args:
    width (int): the width of the window in which values are averaged.

+------+------+
| name | word |
+------+------+

>>> mean([1, 2, 3]) is a call that is shown as an example here
2.0

- a bullet that says something in more than five words.

.. code-block:: python

   this = "is code that must not be taken for prose at all"

x = f(a[b], {c: d}) * (g / h) = i == j, k != l
"""


def test_prose_is_kept_and_the_rest_dropped() -> None:
    assert prose_paragraphs(SAMPLE) == [
        "Return the mean of the given values, which may be of any numeric type.",
        "The result is computed as follows:",
        "A second paragraph uses literal text and a package.role in it.",
        "The values that are to be averaged over all axes.",
        "the width of the window in which values are averaged.",
        "a bullet that says something in more than five words.",
    ]


def test_module_is_read_in_order_and_never_run(tmp_path: Path) -> None:
    source = '''
        """The module does something that is worth a sentence."""
        raise SystemExit("imported")
        class A:
            """The class A holds things that belong to it."""
            def f(self):
                """The method f returns whatever it was given before."""
        if True:
            add_doc(A, """
            An attached text that is long enough to be told apart.

            It has several lines, the way numpy writes them.
            """.format(x=1))
        def g():
            "Too short."
    '''
    path = tmp_path / "module.py"
    path.write_text(textwrap.dedent(source))
    prose = module_prose(path)
    assert [text.split()[1] for text in prose] == ["module", "class", "method", "attached", "has"]
    (tmp_path / "bad.py").write_text("def broken(:")
    assert module_prose(tmp_path / "bad.py") == []


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "sampled_package"
    (folder / "tests").mkdir(parents=True)
    (folder / "__init__.py").write_text('raise SystemExit("imported")')
    for number in range(60):
        lines = "\n\n".join(f"Sentence {line} of module number {number} says what it does." for line in range(9))
        (folder / f"module{number:02d}.py").write_text(
            f'"""{lines}\n\nShared by all modules: the same licence text."""'
        )
    (folder / "tests" / "test_it.py").write_text((folder / "module00.py").read_text())
    (folder / "empty.py").write_text('"""Hardly any prose in here at all."""')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(docstrings.sysconfig, "get_path", lambda name: str(tmp_path / "no_standard_library"))
    return "sampled_package"


def test_corpus(package: str, tmp_path: Path) -> None:
    sizes = extract_docstrings(tmp_path / "one", (package,))
    extract_docstrings(tmp_path / "two", (package,), workers=2)
    records = {}
    for split, size in sizes.items():
        content = (tmp_path / "one" / f"{split}.jsonl").read_bytes()
        assert content == (tmp_path / "two" / f"{split}.jsonl").read_bytes()
        records[split] = [json.loads(line) for line in content.splitlines()]
        assert size == (len(records[split]), len(content))
        assert all(is_held_out(record["title"]) == (split == "heldout") for record in records[split])
    titles = sorted(record["title"] for split in records.values() for record in split)
    assert titles == [f"sampled_package.module{number:02d}" for number in range(60)]
    assert 1 <= len(records["heldout"]) <= 15
    everything = [line for split in records.values() for record in split for line in record["text"].split("\n")]
    assert len(everything) == len(set(everything))  # no paragraph stands in both splits


def test_a_paragraph_that_differs_in_names_is_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docstrings, "MIN_WORDS", 5)
    paragraphs = [
        "Construct a Bert tokenizer, which inherits from PreTrainedTokenizer and has its methods.",
        "Construct a Roberta tokenizer, which inherits from tokenizers.Base and has its methods.",
        "Construct a tokenizer, which inherits from nothing and has its methods.",
    ]
    for number, paragraph in enumerate(paragraphs):
        (tmp_path / f"m{number}.py").write_text(f'"""{paragraph}"""')
    assert [text for _, text in docstrings._documents([("", tmp_path)], 1)] == [paragraphs[0], paragraphs[2]]


def test_packages_that_are_not_installed_are_skipped(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docstrings, "PACKAGES", ("no_such_package", package))
    assert sum(modules for modules, _ in extract_docstrings(tmp_path / "out").values()) == 60


def test_a_tenth_is_held_out() -> None:
    share = sum(is_held_out(f"package.module{number}") for number in range(5000)) / 5000
    assert 0.085 < share < 0.115


def test_existing_folder_and_missing_package(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(DataError, match="exists already"):
        extract_docstrings(tmp_path / "there", ())
    with pytest.raises(DataError, match="no_such_package is no package that is installed here"):
        extract_docstrings(tmp_path / "new", ("no_such_package",))
    assert not (tmp_path / "new").exists()
    for name in ("no_such_package.part", ".x", "__main__"):
        with pytest.raises(DataError, match="no package that is installed here"):
            extract_docstrings(tmp_path / "new", (name,))
    assert docstrings._package_folder("xml.etree").name == "etree"
