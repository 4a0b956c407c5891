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
        spans.append((at + gap, at + gap + length, name))
        at += gap + length
    return spans, at + draw(st.integers(0, 2))


def in_scheme(tags: list[str], scheme: str) -> list[str]:
    """IOB2's tags in another scheme."""
    found = []
    for before, tag, after in zip(["O", *tags], tags, [*tags[1:], "O"], strict=False):
        prefix, last = tag[0], not after.startswith("I")
        if scheme == "iob1" and prefix == "B" and before[1:] != tag[1:]:
            prefix = "I"
        if scheme == "bioes" and prefix != "O" and last:
            prefix = "S" if prefix == "B" else "E"
        found.append(prefix + tag[1:])
    return found


@given(spans_of_a_sentence(), st.sampled_from(["iob1", "iob2", "bioes"]))
def test_spans_are_those_of_each_scheme_and_of_seqeval(sentence: tuple[list[Span], int], scheme: str) -> None:
    spans, num_words = sentence
    tags = in_scheme(write_tags(spans, num_words), scheme)
    assert read_spans(tags, scheme) == spans
    if scheme != "iob1":
        assert [(first, last + 1, name) for name, first, last in get_entities(tags)] == spans


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
        (["-A"], "iob1"),
        (["BI-A"], "iob1"),
    ],
)
def test_an_illegal_sequence_is_refused(tags: list[str], scheme: str) -> None:
    with pytest.raises(DataError, match=rf"^file:{len(tags) - (tags[-1] == 'O')}: "):
        read_spans(tags, scheme, lambda word: f"file:{word + 1}")


@pytest.mark.parametrize("scheme", ["iob1", "iob2"])
def test_tags_without_a_type_are_spans_as_in_seqeval(scheme: str) -> None:
    tags = ["B", "I", "O", "B", "B-A", "I-A"]
    spans = read_spans(tags, scheme)
    assert spans == [(0, 2, ""), (3, 4, ""), (4, 6, "A")] and write_tags(spans, 6) == tags
    assert [(first, last + 1) for _, first, last in get_entities(tags)] == [(start, end) for start, end, _ in spans]
    allowed = legal_transitions(["O", "B", "I", "B-A", "I-A"], True)[:5] == 0
    assert allowed[:, 2].tolist() == [False, True, True, False, False]


def test_the_best_sequence_is_the_best_of_all_legal_ones() -> None:
    labels = ["O", "B-A", "I-A", "B-B", "I-B"]
    transitions = legal_transitions(labels, True)
    generator = np.random.default_rng(1)
    illegal = 0
    for _ in range(20):
        scores = generator.normal(size=(4, len(labels))) * 3
        found = best_sequence(scores, transitions)
        best, total = [], -np.inf
        for path in product(range(len(labels)), repeat=4):
            try:
                read_spans([labels[label] for label in path], "iob2")
            except DataError:
                illegal += 1
                continue
            value = float(scores[range(4), path].sum())
            if value > total:
                best, total = list(path), value
        assert found == best
    assert illegal and (transitions == FORBIDDEN).any()
    assert not legal_transitions(labels, False).any()
