"""BERT's pairs against a transcription of the original, decision by decision."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.sample_data import Documents, random_documents, table_of
from tests.unit.data.formats.bert_reference import create_instances
from tests.unit.data.formats.pairs import KernelCoins, KernelDraws, Record, pairs_of


@pytest.mark.parametrize("sample_format", ["segment_pair", "sentence_order"])
@pytest.mark.parametrize("room", [2, 5, 29, 125, 509])
@pytest.mark.parametrize("short_seq_prob", [0.0, 0.1, 1.0])
def test_same_draws_give_the_originals_instances(sample_format: str, room: int, short_seq_prob: float) -> None:
    """The original's code, fed with the kernel's own draws, makes every decision alike."""
    documents = random_documents(60, sentences=10, tokens=15, seed=room)
    tokens = [token for document in documents for sentence in document for token in sentence]
    for duplicate in range(2):
        expected = []
        for number in range(len(documents)):
            first = sum(map(len, documents[:number]))
            expected += create_instances(
                documents, number, room, short_seq_prob, KernelDraws(4, sample_format, duplicate, number),
                partial(KernelCoins, 4, sample_format, duplicate, first), sample_format == "segment_pair",
            )  # fmt: skip
        pairs = pairs_of(table_of(documents), sample_format, room, short_seq_prob, 4, duplicate)
        found = [
            {"a": tokens[a0:a1], "b": tokens[b0:b1], "is_random": bool(label)} for a0, a1, b0, b1, _, label in pairs
        ]
        assert found == expected


def test_random_next_is_from_another_document_and_true_next_follows() -> None:
    for documents in (random_documents(2, seed=3), random_documents(400, seed=4)):
        table = table_of(documents)
        document_of = np.repeat(np.arange(len(documents)), [sum(map(len, d)) for d in documents])
        for duplicate in range(200 if len(documents) == 2 else 1):
            for a0, a1, b0, b1, _, is_random in pairs_of(table, "segment_pair", 125, 0.1, 1, duplicate):
                assert (document_of[a0] != document_of[b0]) == bool(is_random)
                assert document_of[a0] == document_of[a1 - 1] and document_of[b0] == document_of[b1 - 1]
                assert is_random or b0 >= a1


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
    assert pairs_of(table_of(documents), "sentence_pair", 29, 0.0, 3, 1) == expected
