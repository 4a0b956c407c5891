"""Occurrences of one word in many sentences: groups of them, their neighbours, a picture; static against contextual."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.apps.downstream.features.choice import LayerChoice
from ctxlm_ds.apps.downstream.features.sources import FeatureSource
from ctxlm_ds.apps.downstream.features.static import StaticVectors
from ctxlm_ds.errors import ConfigError, DataError

Vectors = NDArray[np.float32]
CONTEXT = 4
"""Words to each side of an occurrence that are shown."""
LONGEST = 100
"""Words of the longest sentence that is read."""


@dataclass(frozen=True)
class Occurrence:
    """A word in a sentence."""

    words: tuple[str, ...]
    place: int

    @property
    def context(self) -> str:
        """Return the words around it."""
        return " ".join(self.words[max(0, self.place - CONTEXT) : self.place + CONTEXT + 1])


@dataclass(frozen=True)
class Sense:
    """Occurrences whose vectors are close to each other."""

    occurrences: list[int]
    neighbours: list[str]
    """Other words of the same sentences with the closest vectors."""


@dataclass(frozen=True)
class Senses:
    """What vectors say about a word."""

    occurrences: list[Occurrence]
    vectors: Vectors
    """[occurrences, width], centred."""
    senses: list[Sense]


def find_occurrences(sentences: Iterable[Sequence[str]], word: str, most: int) -> list[Occurrence]:
    """Return the first occurrence of a word, in upper or lower case, in each of the first sentences that have it.

    Raises:
        DataError: fewer than two sentences have the word.
        ConfigError: the word has spaces.
    """
    if len(word.split()) != 1:
        raise ConfigError(f"--word {word!r}: one word without spaces")
    lower = word.lower()
    having = (tuple(words) for words in sentences if len(words) <= LONGEST and lower in map(str.lower, words))
    found = [Occurrence(words, [one.lower() for one in words].index(lower)) for words in islice(having, most)]
    if len(found) < 2:
        raise DataError(f"--word {word}: {len(found)} sentences of the text have it; give more text or another word")
    return found


def find_senses(
    occurrences: Sequence[Occurrence], source: FeatureSource, choice: LayerChoice, num_senses: int, num_neighbours: int
) -> Senses:
    """Group the occurrences by their vectors (k-means), and find the words that each group is closest to.

    Vectors are centred by the mean of all words of the sentences: contextual vectors share a direction.
    """
    from sklearn.cluster import KMeans

    word = occurrences[0].words[occurrences[0].place].lower()
    of_sentences = [choice.select(layers)[0] for layers in source.vectors([one.words for one in occurrences])]
    mean = np.concatenate(of_sentences).mean(axis=0)
    vectors = np.stack([found[one.place] for found, one in zip(of_sentences, occurrences, strict=True)]) - mean
    names, others = _mean_by_word(occurrences, of_sentences, word)
    groups = KMeans(min(num_senses, len(vectors)), n_init=10, random_state=0).fit_predict(_normalized(vectors))
    senses = []
    for group in range(groups.max() + 1):
        members = np.flatnonzero(groups == group)
        closest = _closest(vectors[members].mean(axis=0), others - mean, num_neighbours)
        senses.append(Sense(members.tolist(), [names[at] for at in closest]))
    return Senses(list(occurrences), vectors, senses)


def _mean_by_word(
    occurrences: Sequence[Occurrence], of_sentences: Sequence[Vectors], word: str
) -> tuple[list[str], Vectors]:
    """Return the other words (of letters) of the sentences and the mean of each one's vectors."""
    groups: dict[str, list[Vectors]] = {}
    for one, vectors in zip(occurrences, of_sentences, strict=True):
        for other, vector in zip(one.words, vectors, strict=True):
            if other.isalpha() and other.lower() != word:
                groups.setdefault(other.lower(), []).append(vector)
    means = [np.mean(several, axis=0) for several in groups.values()]
    width = of_sentences[0].shape[1]
    return list(groups), np.array(means, dtype=np.float32).reshape(-1, width)


def _normalized(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    found: Vectors = vectors / np.maximum(lengths, 1e-12)
    return found


def _closest(vector: Vectors, others: Vectors, count: int) -> list[int]:
    """Return the rows of `others` with the largest cosines."""
    return [int(at) for at in np.argsort(-(_normalized(others) @ _normalized(vector)), kind="stable")[:count]]


def static_neighbours(static: StaticVectors, word: str, count: int) -> list[str]:
    """Return the words whose static vectors are closest to that of a word.

    Raises:
        DataError: the file has no such word.
    """
    row = static.row_of(word)
    if row is None:
        raise DataError(f"--word {word}: the file of static vectors does not have it; train on more text")
    names = list(static.rows)
    return [names[at] for at in _closest(static.table[row], static.table, count + 1) if at != row][:count]


def draw(found: Senses, static: StaticVectors, words: Sequence[str], source: str) -> bytes:
    """Return a PNG: the static vectors of `words`, and each occurrence's vector; both by PCA.

    Args:
        found: the occurrences of the word.
        static: vectors of the left half.
        words: the word as `static_neighbours` looks it up, then its neighbours.
        source: where the vectors of the occurrences come from.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    places = _plane(static.look_up(words))
    left.scatter(places[:, 0], places[:, 1], c=["tab:red", *["tab:gray"] * (len(words) - 1)], s=25)
    for word, (x, y) in zip(words, places, strict=True):
        left.annotate(word, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=8)
    left.set_title(f"static: one vector of “{words[0]}” and its neighbours")
    _draw_occurrences(right, found)
    right.set_title(f"contextual: {len(found.occurrences)} occurrences ({source})")
    for axes in (left, right):
        axes.set_xticks([])
        axes.set_yticks([])
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _draw_occurrences(axes: Any, found: Senses) -> None:
    places = _plane(found.vectors)
    for number, sense in enumerate(found.senses):
        members = places[sense.occurrences]
        label = f"{len(members)}: near {', '.join(sense.neighbours[:5])}"
        axes.scatter(members[:, 0], members[:, 1], s=18, color=f"C{number}", label=label)
        for at in sense.occurrences[:4]:
            text = found.occurrences[at].context
            axes.annotate(text, places[at], xytext=(4, 3), textcoords="offset points", fontsize=6)
    axes.legend(fontsize=7)


def _plane(vectors: Vectors) -> NDArray[np.floating]:
    """Return two coordinates of each vector: the first principal components."""
    centred = vectors - vectors.mean(axis=0)
    left, scale, _ = np.linalg.svd(centred, full_matrices=False)
    plane: NDArray[np.floating] = np.zeros((len(vectors), 2))
    plane[:, : min(2, len(scale))] = (left * scale)[:, :2]
    return plane
