"""Tags of words: schemes of files (IOB1, IOB2, BIOES), conversion to IOB2, and the best legal sequence of tags."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.problems import show_value

OUTSIDE = "O"
FORBIDDEN = -1e9
PREFIXES = {"iob1": "BI", "iob2": "BI", "bioes": "BIES"}


Span = tuple[int, int, str]
"""First word, word after the last, and type."""


def read_spans(tags: Sequence[str], scheme: str, origin_of: Callable[[int], str] = str) -> list[Span]:
    """Return the spans that tags of a scheme describe.

    IOB1: B only divides two adjacent spans of a type. IOB2: each span begins with B. BIOES: last word E, single word S.
    A tag without a type (B, I) is of the empty type. `origin_of` names a word for messages. Raises DataError for a tag
    that is not one of the scheme, or a sequence that is illegal in IOB2 or BIOES.
    """
    spans: list[Span] = []
    start, type_ = 0, None
    for place, tag in enumerate([*tags, OUTSIDE]):
        prefix, name = _parts(tag, scheme, origin_of, place)
        continues = name == type_ and prefix in ("I", "E")
        if not continues and scheme != "iob1" and prefix in ("I", "E"):
            before = tags[place - 1] if place else "the start"
            raise DataError(f"{origin_of(place)}: the tag {tag} cannot follow {before} in {scheme}")
        if type_ is not None and not continues:
            if scheme == "bioes" and _parts(tags[place - 1], scheme, origin_of, place - 1)[0] in "BI":
                raise DataError(f"{origin_of(place - 1)}: the span does not end here with E, as in bioes")
            spans.append((start, place, type_))
            type_ = None
        if prefix and type_ is None:
            start, type_ = place, name
        if type_ is not None and prefix in ("E", "S"):
            spans.append((start, place + 1, type_))
            type_ = None
    return spans


def _parts(tag: str, scheme: str, origin_of: Callable[[int], str], place: int) -> tuple[str, str]:
    if tag == OUTSIDE:
        return "", ""
    prefix, dash, name = tag.partition("-")
    if bool(dash) != bool(name) or prefix not in [*PREFIXES[scheme]]:
        expected = ", ".join(f"{letter}-TYPE" for letter in PREFIXES[scheme])
        raise DataError(f"{origin_of(place)}: the tag {show_value(tag)} is not one of {scheme}: O, {expected}")
    return prefix, name


def write_tags(spans: Sequence[Span], num_words: int) -> list[str]:
    """Return IOB2's tags for spans."""
    tags = [OUTSIDE] * num_words
    for start, end, label in spans:
        typed = f"-{label}" if label else ""
        tags[start:end] = ["B" + typed, *["I" + typed] * (end - start - 1)]
    return tags


def legal_transitions(labels: Sequence[str], spans: bool) -> NDArray[np.float64]:
    """Return what following costs: [labels + 2, labels + 2], the last two are start and end of a sentence.

    0 for a legal pair of IOB2's tags, FORBIDDEN otherwise. Without `spans` all are legal.
    """
    costs = np.zeros((len(labels) + 2, len(labels) + 2))
    for after, label in enumerate(labels):
        if spans and label.startswith("I"):
            before = (label, "B" + label[1:])
            costs[:, after] = [0.0 if one in before else FORBIDDEN for one in (*labels, OUTSIDE, OUTSIDE)]
    return costs


def best_sequence(scores: NDArray[np.floating], transitions: NDArray[np.float64]) -> list[int]:
    """Return the legal sequence of labels with the largest sum of scores [words, labels] (Viterbi)."""
    num_words, size = scores.shape
    best = scores[0] + transitions[size, :size]
    origin = np.zeros((num_words, size), dtype=np.int64)
    for word in range(1, num_words):
        total = best[:, None] + transitions[:size, :size]
        origin[word] = total.argmax(axis=0)
        best = total.max(axis=0) + scores[word]
    path = [int((best + transitions[:size, size + 1]).argmax())]
    for word in range(num_words - 1, 0, -1):
        path.append(int(origin[word, path[-1]]))
    return path[::-1]


def marginals(scores: NDArray[np.floating], transitions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability of each label of each word under a linear chain of scores [words, labels].

    The algorithm is forward-backward; transitions are as of `legal_transitions`.
    """
    num_words, size = scores.shape
    inner = transitions[:size, :size]
    forward, backward = np.zeros((num_words, size)), np.zeros((num_words, size))
    forward[0], backward[-1] = scores[0] + transitions[size, :size], transitions[:size, size + 1]
    for word in range(1, num_words):
        forward[word] = scores[word] + np.logaddexp.reduce(forward[word - 1][:, None] + inner, axis=0)
        after = num_words - word
        backward[after - 1] = np.logaddexp.reduce(inner + (scores[after] + backward[after])[None, :], axis=1)
    return np.exp(forward + backward - np.logaddexp.reduce(forward[-1] + backward[-1]))
