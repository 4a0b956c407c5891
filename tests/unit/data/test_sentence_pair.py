"""Pairs of single natural sentences."""

from __future__ import annotations

import random

import numpy as np

from ctxlm_ds.data.samples.sentence_pair import document_pairs, sentence_pairs
from tests.sample_data import numbered_documents, random_documents, table_of


def test_each_side_is_one_sentence() -> None:
    table = table_of(random_documents(100, tokens=10, seed=1))
    sentences = set(zip(table.starts.tolist(), table.ends.tolist(), strict=True))
    for a0, a1, b0, b1, length, _ in sentence_pairs(table, 10_000, 3, 1, 0):
        assert (a0, a1) in sentences and (b0, b1) in sentences
        assert length == a1 - a0 + b1 - b0 + 3


def test_true_next_follows_and_random_next_is_elsewhere() -> None:
    documents = random_documents(50, seed=2)
    table = table_of(documents)
    document_of = np.repeat(np.arange(50), [sum(map(len, d)) for d in documents])
    for a0, a1, b0, _, _, is_random in sentence_pairs(table, 10_000, 3, 1, 0):
        assert (document_of[a0] != document_of[b0]) if is_random else (b0 == a1 and document_of[a0] == document_of[b0])


def test_share_of_random_next_and_coverage() -> None:
    table = table_of(numbered_documents([[3] * 500] * 30))
    records = np.array(list(sentence_pairs(table, 100, 3, 1, 0)))
    labels = records[:, 5]
    assert abs(labels.mean() - 0.5) < 4 * np.sqrt(0.25 / len(labels)) + 30 / len(labels)
    used = np.zeros(int(table.ends[-1]), dtype=int)
    for a0, a1, b0, b1, _, is_random in records.tolist():
        used[a0:a1] += 1
        used[b0:b1] += not is_random
    assert (used == 1).all()


def test_long_sentences_are_shortened_from_the_longer_side() -> None:
    table = table_of(numbered_documents([[5, 300], [400, 2]]))
    for document in (0, 1):
        for a0, a1, b0, b1, length, _ in document_pairs(table, document, 40, 3, random.Random(document)):
            assert length <= 43
            assert min(a1 - a0, b1 - b0) in (2, 5, 20)


def test_passes_and_seeds_differ() -> None:
    table = table_of(random_documents(50, seed=3))
    keys = ((1, 0), (1, 1), (2, 0), (1, 0))
    drawn = [list(sentence_pairs(table, 100, 3, seed, duplicate)) for seed, duplicate in keys]
    assert drawn[0] == drawn[3] and drawn[0] != drawn[1] and drawn[0] != drawn[2]
