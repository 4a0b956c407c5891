"""ALBERT's pairs against a transcription of the original, decision by decision and in distribution."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.sample_data import numbered_documents, random_documents, table_of
from tests.unit.data.formats.bert_reference import create_instances
from tests.unit.data.formats.pairs import KernelCoins, KernelDraws, ordered_segments

FORMAT, SPECIALS = "sentence_order", 3


@pytest.mark.parametrize("room", [2, 29, 125, 509])
@pytest.mark.parametrize("short_seq_prob", [0.0, 0.1, 1.0])
def test_same_draws_give_the_originals_instances(room: int, short_seq_prob: float) -> None:
    documents = random_documents(60, sentences=10, tokens=15, seed=room)
    tokens = [token for document in documents for sentence in document for token in sentence]
    for duplicate in range(2):
        expected = []
        for number in range(len(documents)):
            first = sum(map(len, documents[:number]))
            expected += create_instances(
                documents, number, room, short_seq_prob, KernelDraws(4, FORMAT, duplicate, number),
                partial(KernelCoins, 4, FORMAT, duplicate, first), random_next_sentence=False,
            )  # fmt: skip
        pairs = ordered_segments(table_of(documents), room, SPECIALS, short_seq_prob, 4, duplicate)
        found = [
            {"a": tokens[a0:a1], "b": tokens[b0:b1], "is_random": bool(label)} for a0, a1, b0, b1, _, label in pairs
        ]
        assert found == expected


def test_half_of_the_pairs_are_exchanged_and_all_are_of_one_document() -> None:
    documents = numbered_documents([[10] * 400] * 40)
    pairs = np.array(ordered_segments(table_of(documents), 61, SPECIALS, 0.0, 1, 0))
    document_of, exchanged = pairs[:, [0, 2]] // 4000, pairs[:, 2] < pairs[:, 0]
    together = document_of[:, 0] == document_of[:, 1]
    # A document's last sentence, if it is alone, has a partner from another document.
    assert (~together).sum() <= 40 and (pairs[~together, 5] == 1).all()
    assert np.array_equal(pairs[together, 5] == 1, exchanged[together])
    assert abs(exchanged[together].mean() - 0.5) < 4 * np.sqrt(0.25 / together.sum())
