"""Pairs of single natural sentences."""

from __future__ import annotations

import numpy as np

from tests.sample_data import Documents, ends_of, numbered_documents, random_documents, starts_of, table_of
from tests.unit.data.formats.pairs import KernelCoins, KernelDraws, Record, sentence_pairs


def plain_pairs(documents: Documents, number: int, room: int, draws: KernelDraws) -> list[Record]:
    """The definition, read plainly, with the same draws in the same order (seed 3, pass 1)."""
    lengths = [[len(sentence) for sentence in document] for document in documents]
    first = sum(sum(document) for document in lengths[:number])
    starts = [first + sum(lengths[number][:k]) for k in range(len(lengths[number]) + 1)]
    found = []
    sentence = 0
    while sentence < len(lengths[number]):
        a_sentence, a = sentence, [starts[sentence], starts[sentence + 1]]
        is_random = sentence == len(lengths[number]) - 1 or draws.random() < 0.5
        if is_random:
            other = number
            while other == number:
                other = draws.randint(0, len(documents) - 1)
            drawn = draws.randint(0, len(lengths[other]) - 1)
            start = sum(sum(document) for document in lengths[:other]) + sum(lengths[other][:drawn])
            b = [start, start + lengths[other][drawn]]
        else:
            b = [starts[sentence + 1], starts[sentence + 2]]
        sentence += 1 if is_random else 2
        coins = KernelCoins(3, "sentence_pair", 1, sum(map(len, documents[:number])), a_sentence)
        while a[1] - a[0] + b[1] - b[0] > room:
            side = a if a[1] - a[0] > b[1] - b[0] else b
            if coins.random() < 0.5:
                side[0] += 1
            else:
                side[1] -= 1
        found.append((*a, *b, a[1] - a[0] + b[1] - b[0] + 3, int(is_random)))
    return found


def test_same_draws_give_the_same_pairs_as_the_plain_definition() -> None:
    documents = random_documents(25, sentences=5, tokens=12, seed=5)
    expected = [
        pair
        for number in range(len(documents))
        for pair in plain_pairs(documents, number, 29, KernelDraws(3, "sentence_pair", 1, number))
    ]
    assert sentence_pairs(table_of(documents), 29, 3, 3, 1) == expected


def test_each_side_is_one_sentence() -> None:
    table = table_of(random_documents(100, tokens=10, seed=1))
    sentences = set(zip(starts_of(table).tolist(), ends_of(table).tolist(), strict=True))
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
    used = np.zeros(int(ends_of(table)[-1]), dtype=int)
    for a0, a1, b0, b1, _, is_random in records.tolist():
        used[a0:a1] += 1
        used[b0:b1] += not is_random
    assert (used == 1).all()


def test_long_sentences_are_shortened_from_the_longer_side() -> None:
    table = table_of(numbered_documents([[5, 300], [400, 2]]))
    for seed in range(20):
        for a0, a1, b0, b1, length, _ in sentence_pairs(table, 40, 3, seed, 0):
            assert length <= 43
            assert min(a1 - a0, b1 - b0) in (2, 5, 20)


def test_passes_and_seeds_differ() -> None:
    table = table_of(random_documents(50, seed=3))
    keys = ((1, 0), (1, 1), (2, 0), (1, 0))
    drawn = [sentence_pairs(table, 100, 3, seed, duplicate) for seed, duplicate in keys]
    assert drawn[0] == drawn[3] and drawn[0] != drawn[1] and drawn[0] != drawn[2]
