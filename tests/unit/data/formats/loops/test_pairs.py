"""BERT's pairs against a transcription of the original, decision by decision and in distribution."""

from __future__ import annotations

import itertools
import random
from functools import partial

import numpy as np
import pytest

from ctxlm_ds.data.index.sentence_table import UNALIGNED, SentenceTable
from tests.sample_data import Documents, ends_of, numbered_documents, random_documents, starts_of, table_of
from tests.unit.data.formats.bert_reference import create_instances
from tests.unit.data.formats.pairs import (
    KernelCoins,
    KernelDraws,
    Record,
    ordered_segments,
    segment_pairs,
    sentence_pairs,
)

SPECIALS = 3


def flat(documents: list[list[list[int]]]) -> list[int]:
    return [token for document in documents for sentence in document for token in sentence]


@pytest.mark.parametrize("room", [2, 5, 29, 125, 509])
@pytest.mark.parametrize("short_seq_prob", [0.0, 0.1, 1.0])
def test_same_draws_give_the_originals_instances(room: int, short_seq_prob: float) -> None:
    """The original's code, fed with the kernel's own draws, makes every decision alike."""
    documents = random_documents(60, sentences=10, tokens=15, seed=room)
    table, tokens = table_of(documents), flat(documents)
    for duplicate in range(2):
        expected = []
        for number in range(len(documents)):
            first = sum(map(len, documents[:number]))
            expected += create_instances(
                documents, number, room, short_seq_prob, KernelDraws(4, "segment_pair", duplicate, number),
                partial(KernelCoins, 4, "segment_pair", duplicate, first),
            )  # fmt: skip
        found = [
            {"a": tokens[a0:a1], "b": tokens[b0:b1], "is_random": bool(is_random)}
            for a0, a1, b0, b1, _, is_random in segment_pairs(table, room, SPECIALS, short_seq_prob, 4, duplicate)
        ]
        assert found == expected


def test_distributions_equal_the_originals() -> None:
    """Our own keyed draws against the original under Python's generator: labels, lengths, number of instances."""
    documents = random_documents(3000, sentences=10, tokens=15, seed=1)
    table = table_of(documents)
    ours = np.array(list(segment_pairs(table, 125, SPECIALS, 0.1, seed=3, duplicate=0)))
    rng = random.Random(5)
    theirs = [row for number in range(len(documents)) for row in create_instances(documents, number, 125, 0.1, rng)]
    their_random = np.array([row["is_random"] for row in theirs])
    their_lengths = np.array([len(row["a"]) + len(row["b"]) for row in theirs])
    our_lengths = ours[:, 4] - SPECIALS
    count = min(len(ours), len(theirs))
    assert abs(len(ours) - len(theirs)) < 0.02 * len(theirs)
    assert abs(ours[:, 5].mean() - their_random.mean()) < 4 * np.sqrt(2 * 0.25 / count)
    assert abs(our_lengths.mean() - their_lengths.mean()) < 4 * np.sqrt(2 * their_lengths.var() / count)
    quantiles = np.quantile(their_lengths, np.linspace(0.02, 0.98, 25))
    gap = np.abs([(our_lengths <= quantile).mean() - (their_lengths <= quantile).mean() for quantile in quantiles])
    assert gap.max() < 1.95 * np.sqrt(2 / count)  # Kolmogorov-Smirnov at 0.001


def test_random_next_is_from_another_document_and_true_next_follows() -> None:
    for documents in (random_documents(2, seed=3), random_documents(400, seed=4)):
        table = table_of(documents)
        document_of = np.repeat(np.arange(len(documents)), [sum(map(len, d)) for d in documents])
        for duplicate in range(200 if len(documents) == 2 else 1):
            for a0, a1, b0, b1, _, is_random in segment_pairs(table, 125, SPECIALS, 0.1, 1, duplicate):
                assert (document_of[a0] != document_of[b0]) == bool(is_random)
                assert document_of[a0] == document_of[a1 - 1] and document_of[b0] == document_of[b1 - 1]
                assert is_random or b0 >= a1


def test_share_of_random_next() -> None:
    """Half of the pairs where A is not a document's last sentence; forced ones come on top, as in the original."""
    documents = numbered_documents([[10] * 400] * 40)
    table = table_of(documents)
    labels = np.array([record[5] for record in segment_pairs(table, 61, SPECIALS, 0.0, 1, 0)])
    assert abs(labels.mean() - 0.5) < 4 * np.sqrt(0.25 / len(labels)) + 40 / len(labels)


def by_document(records: list[Record], tokens: int) -> list[list[Record]]:
    """Pairs grouped by the document of A, all documents having equally many tokens."""
    grouped = itertools.groupby(records, key=lambda record: record[0] // tokens)
    return [list(group) for _, group in grouped]


def uniform_table(documents: int, sentences: int) -> SentenceTable:
    """Documents of equally many sentences of one token."""
    starts = np.arange(documents * sentences).view(UNALIGNED)
    starts.flags.writeable = False
    bounds = np.arange(documents + 1) * sentences
    return SentenceTable(starts, 0, bounds, bounds[1:], True)


def test_target_is_drawn_once_a_document() -> None:
    """With short_seq_prob 1 the pairs of one document share a target; over documents targets are uniform in 2..room."""
    room = 101
    targets = []
    for records in by_document(segment_pairs(uniform_table(3000, 1000), room, SPECIALS, 1.0, 5, 0), 1000):
        lengths = [record[4] - SPECIALS for record in records]
        # One-token sentences reach a target exactly, except where a document ends.
        targets.append(max(lengths))
        full = [length for length in lengths if length == targets[-1]]
        assert len(full) >= 0.5 * len(lengths)
    counts = np.bincount(targets, minlength=room + 1)[2:]
    expected = 3000 / len(counts)
    assert abs(((counts - expected) ** 2 / expected).sum() - (len(counts) - 1)) < 5 * np.sqrt(2 * (len(counts) - 1))


def test_share_of_short_documents() -> None:
    room = 100
    records = np.array(segment_pairs(uniform_table(6000, 300), room, SPECIALS, 0.1, 9, 0))
    longest = np.zeros(6000)
    np.maximum.at(longest, records[:, 0] // 300, records[:, 4] - SPECIALS)
    share = (longest < room).mean()
    expected = 0.1 * 98 / 99  # a short target may also be the longest one
    assert abs(share - expected) < 4 * np.sqrt(0.09 / 6000)


def test_every_sentence_is_used_in_every_pass() -> None:
    """Put back: with nothing to truncate, A and true-next B cover the corpus exactly once."""
    documents = random_documents(200, sentences=8, tokens=5, seed=2)
    table = table_of(documents)
    for duplicate in range(2):
        used = np.zeros(int(ends_of(table)[-1]), dtype=int)
        for a0, a1, b0, b1, _, is_random in segment_pairs(table, 10_000, SPECIALS, 0.3, 1, duplicate):
            used[a0:a1] += 1
            if not is_random:
                used[b0:b1] += 1
        assert (used == 1).all()


def test_pairs_fit_and_depend_on_their_key_alone() -> None:
    documents = random_documents(100, seed=5)
    table = table_of(documents)
    records = list(segment_pairs(table, 61, 4, 0.1, seed=1, duplicate=0))
    assert all(record[4] <= 65 and record[1] > record[0] and record[3] > record[2] for record in records)
    assert max(record[4] for record in records) == 65
    assert records == list(segment_pairs(table, 61, 4, 0.1, seed=1, duplicate=0))
    assert records != list(segment_pairs(table, 61, 4, 0.1, seed=1, duplicate=1))
    assert records != list(segment_pairs(table, 61, 4, 0.1, seed=2, duplicate=0))


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


FORMAT = "sentence_order"


@pytest.mark.parametrize("room", [2, 29, 125, 509])
@pytest.mark.parametrize("short_seq_prob", [0.0, 0.1, 1.0])
def test_same_draws_give_the_originals_ordered_instances(room: int, short_seq_prob: float) -> None:
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
