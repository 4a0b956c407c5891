"""corpus.json: every measure counts what it says, published counts are checked, sources of which nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.commands.prepare_corpus import empty_warnings
from ctxlm_ds.data.hygiene.corpora import Expectation
from ctxlm_ds.data.hygiene.prepare import PrepareOptions, prepare_corpus
from tests.text import make_documents
from tests.unit.data.hygiene.conftest import recipe_of, source_of, write_lines


@pytest.mark.parametrize(("count", "tolerance", "met"), [(10, 0.0, True), (11, 0.1, True), (12, 0.1, False)])
def test_published_counts_are_checked(tmp_path: Path, count: int, tolerance: float, met: bool) -> None:
    expected = [Expectation(measure="records_read", count=count, tolerance=tolerance, published="a paper")]
    path = write_lines(tmp_path / "in.jsonl", make_documents(10))
    recipe = recipe_of(source_of("part", path, expected=expected))
    for options, checked in (
        (PrepareOptions(), True),
        (PrepareOptions(replaced=("part",), overwrite=True), False),
        (PrepareOptions(limit_bytes=10**6, overwrite=True), False),
    ):
        check = prepare_corpus(recipe, tmp_path / "out", options)["expected"][0]
        assert (check["found"], check["count"], check["checked"]) == (10, count, checked)
        assert check["met"] == (met or not checked)


def test_every_measure_counts_what_it_says(tmp_path: Path) -> None:
    texts = ["one two three four", "", "größer als fünf"]
    measures = ["records_read", "documents_read", "words_read", "bytes_read"]
    measures += ["documents_written", "words_written", "bytes_written"]
    expected = [Expectation(measure=measure, count=1, published="a paper") for measure in measures]
    recipe = recipe_of(source_of("part", write_lines(tmp_path / "in.jsonl", texts), expected=expected), min_words=4)
    checks = prepare_corpus(recipe, tmp_path / "out", PrepareOptions())["expected"]
    assert [check["found"] for check in checks] == [3, 2, 7, 18 + 18, 1, 4, 18]


def test_sources_of_which_nothing_is_left_are_in_no_blend(tmp_path: Path) -> None:
    sources = [
        source_of("long", write_lines(tmp_path / "long.jsonl", make_documents(3))),
        source_of("short", write_lines(tmp_path / "short.jsonl", ["too short"])),
    ]
    report = prepare_corpus(recipe_of(*sources, min_words=5), tmp_path / "out", PrepareOptions())
    blend = (tmp_path / "out/blend.yaml").read_text()
    assert "name: long" in blend and "short" not in blend
    assert empty_warnings(report) == ["short: none of its 1 records was left; see dropped.jsonl"]
    nothing = prepare_corpus(recipe_of(*sources, min_words=10**6), tmp_path / "nothing", PrepareOptions())
    assert not (tmp_path / "nothing/blend.yaml").exists()
    assert "no document was left of 4 records (dropped by length 4; loosen" in empty_warnings(nothing)[0]
