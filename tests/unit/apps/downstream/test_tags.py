"""Tags: spans of each scheme, conversion, and legal sequences, against seqeval and all sequences by hand."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seqeval.metrics.sequence_labeling import get_entities

from ctxlm_ds.apps.downstream.tags import FORBIDDEN, Span, best_sequence, legal_transitions, read_spans, write_tags
from ctxlm_ds.errors import DataError


@st.composite
def spans_of_a_sentence(draw: st.DrawFn) -> tuple[list[Span], int]:
    spans, at = [], 0
    for gap, length, name in draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.sampled_from("AB")))):
        spans.append(Span(name, at + gap, at + gap + length))
        at += gap + length
    return spans, at + draw(st.integers(0, 2))


@given(spans_of_a_sentence(), st.sampled_from(["iob1", "iob2", "bioes"]))
def test_writing_then_reading_returns_the_spans(sentence: tuple[list[Span], int], scheme: str) -> None:
    spans, num_words = sentence
    assert read_spans(write_tags(spans, num_words, scheme), scheme) == spans


@given(spans_of_a_sentence())
def test_spans_are_those_of_seqeval(sentence: tuple[list[Span], int]) -> None:
    spans, num_words = sentence
    for scheme in ("iob2", "bioes"):
        found = get_entities(write_tags(spans, num_words, scheme))
        assert [Span(name, first, last + 1) for name, first, last in found] == spans


@pytest.mark.parametrize(
    ("tags", "scheme"),
    [
        (["O", "I-A"], "iob2"),
        (["B-A", "I-B"], "iob2"),
        (["B-A", "O"], "bioes"),
        (["B-A"], "bioes"),
        (["E-A"], "bioes"),
        (["S-A"], "iob2"),
        (["A"], "iob1"),
        (["B-"], "iob1"),
    ],
)
def test_an_illegal_sequence_is_refused(tags: list[str], scheme: str) -> None:
    with pytest.raises(DataError, match="file:3"):
        read_spans(tags, scheme, "file:3")


@pytest.mark.parametrize("scheme", ["iob1", "iob2", "bioes"])
def test_the_best_sequence_is_the_best_of_all_legal_ones(scheme: str) -> None:
    letters = {"iob1": "BI", "iob2": "BI", "bioes": "BIES"}[scheme]
    labels = ["O", *(f"{letter}-{name}" for name in ("A", "B")[: 2 if scheme != "bioes" else 1] for letter in letters)]
    transitions = legal_transitions(labels, scheme)
    generator = np.random.default_rng(1)
    illegal = 0
    for _ in range(20):
        scores = generator.normal(size=(4, len(labels))) * 3
        found = best_sequence(scores, transitions)
        best, total = [], -np.inf
        for path in product(range(len(labels)), repeat=4):
            try:
                spans = read_spans([labels[label] for label in path], scheme)
            except DataError:
                illegal += 1
                continue
            if scheme == "iob1" and write_tags(spans, 4, scheme) != [labels[label] for label in path]:
                continue
            value = float(scores[range(4), path].sum())
            if value > total:
                best, total = list(path), value
        assert found == best
    assert illegal or scheme == "iob1"
    assert (transitions == FORBIDDEN).any()
    assert not legal_transitions(labels, None).any()
