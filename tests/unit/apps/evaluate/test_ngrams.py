"""Kneser-Ney trigrams against the definition, one n-gram at a time."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ctxlm_ds.apps.evaluate.ngrams import NgramModel, compare_ngrams, marked_words, trigram_probabilities
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.errors import DataError
from tests.sample_data import DatasetWriter, write_dataset

IDS = 6


def discount(counts: list[int]) -> float:
    ones, twos = counts.count(1), counts.count(2)
    return ones / (ones + 2 * twos) if ones else 0.5


def by_definition(text: list[int], u: int, v: int, w: int) -> float:
    """Chen & Goodman 1999, section 3: continuation counts below the highest order."""
    trigrams = list(zip(text, text[1:], text[2:], strict=False))
    types = set(trigrams)
    pairs = {(b, c) for _, b, c in types}
    bigrams = set(zip(text, text[1:], strict=False))
    after = {pair: len({a for a, b, c in types if (b, c) == pair}) for pair in pairs}
    unigram = {c: len({b for b, d in bigrams if d == c}) for _, c in bigrams}
    d1, d2 = discount(list(unigram.values())), discount(list(after.values()))
    d3 = discount([trigrams.count(one) for one in types])
    share = max(unigram.get(w, 0) - d1, 0) / len(bigrams) + d1 * len(unigram) / len(bigrams) / IDS
    total = sum(count for (b, _), count in after.items() if b == v)
    if total:
        fan = len([pair for pair in after if pair[0] == v])
        share = max(after.get((v, w), 0) - d2, 0) / total + d2 * fan / total * share
    total = sum(1 for a, b, _ in trigrams if (a, b) == (u, v))
    if total:
        fan = len({c for a, b, c in types if (a, b) == (u, v)})
        share = max(trigrams.count((u, v, w)) - d3, 0) / total + d3 * fan / total * share
    return share


def test_probabilities_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    text = np.minimum(rng.geometric(0.4, 60), IDS - 1)
    held_out = rng.integers(0, IDS, 200)
    found = trigram_probabilities(text, held_out, IDS)
    triples = zip(held_out.tolist(), held_out[1:].tolist(), held_out[2:].tolist(), strict=False)
    assert found == pytest.approx([by_definition(text.tolist(), *triple) for triple in triples])


class ByDefinition:
    """Modified Kneser-Ney over sentences, one n-gram at a time (Chen & Goodman 1999; Heafield 2011, section 3)."""

    def __init__(self, sentences: list[list[int]], order: int, num_predicted: int) -> None:
        grams = [
            Counter(tuple(one[at : at + n]) for one in sentences for at in range(len(one) - n + 1))
            for n in range(1, order + 1)
        ]
        self.num_predicted, self.counts = num_predicted, []
        for n, found in enumerate(grams, 1):
            after = Counter(more[1:] for more in grams[n]) if n < order else found
            own = {gram: count if n > 1 and gram[0] == 0 else after[gram] for gram, count in found.items()}
            self.counts.append(own)

    def discount(self, n: int, count: int) -> float:
        number = [list(self.counts[n - 1].values()).count(k) for k in range(5)]
        single = number[1] / (number[1] + 2 * number[2])
        k = min(count, 3)
        return 0.0 if k == 0 else max(0.0, k - (k + 1) * single * number[k + 1] / number[k])

    def probability(self, context: tuple[int, ...], word: int) -> float:
        n = len(context) + 1
        lower = self.probability(context[1:], word) if context else 1 / self.num_predicted
        after = {gram: count for gram, count in self.counts[n - 1].items() if gram[:-1] == context}
        total = sum(after.values())
        if not total:
            return lower
        count = after.get((*context, word), 0)
        left = sum(self.discount(n, each) for each in after.values())
        return (count - self.discount(n, count)) / total + left / total * lower


def test_modified_probabilities_of_sentences_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(3)
    sentences = [[0, *np.minimum(rng.geometric(0.1, rng.integers(1, 9)) + 1, 49).tolist(), 1] for _ in range(150)]
    expected = ByDefinition(sentences, 3, num_predicted=50)  # 1 to 49 and an unknown word
    model = NgramModel(np.array(sum(sentences, [])), 51, 3, begin=0, modified=True)
    read = [*sentences[:20], *([0, *row, 1] for row in rng.integers(2, 51, size=(20, 6)).tolist())]
    found = model.probabilities(np.array(sum(read, [])))
    at = 0
    for sentence in read:
        for place in range(1, len(sentence)):
            context = tuple(sentence[max(0, place - 2) : place])
            assert found[at + place] == pytest.approx(expected.probability(context, sentence[place]))
        at += len(sentence)
    every = np.array([[0, first, last] for first in (2, 50) for last in range(1, 51)]).ravel()
    sums = model.probabilities(every).reshape(2, 50, 3)[:, :, 2].sum(axis=1)
    assert sums == pytest.approx([1.0, 1.0])


def test_of_datasets(tmp_path: Path) -> None:
    text = np.array([1, 2, 3] * 40)
    for name in ("train", "held"):
        with DatasetWriter(tmp_path / name, "uint16") as writer:
            writer.add_documents(text, [len(text)], np.array([1]))
            writer.finalize({"vocab_size": 4})
    sizes, unigram, trigram = compare_ngrams(tmp_path / "train", tmp_path / "held")
    assert sizes == "120 tokens of training text, 120 held out, 4 ids"
    assert f"{-math.log(41 / 124):.4f} nats" in unigram
    assert float(trigram.split()[2]) < 0.05
    with pytest.raises(DataError, match="3 tokens"):
        trigram_probabilities(text[:2], text, 4)


@pytest.mark.parametrize("backward", [False, True])
def test_words_of_both_directions_have_their_ends(tmp_path: Path, backward: bool) -> None:
    documents = [[[5, 9, 6], []], [[7], [8, 5]]]
    dataset = IndexedDataset(write_dataset(tmp_path / "d", documents))
    tokenizer = SimpleNamespace(output_size=9, unk_id=1, cls_id=2, sep_id=3)
    words = marked_words(dataset, tokenizer, backward)  # type: ignore[arg-type]
    assert words.tolist() == ([5, 8, 2, 7, 2, 6, 1, 5, 2] if backward else [5, 1, 6, 3, 7, 3, 8, 5, 3])


def test_each_direction_is_compared(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sentences = [rng.integers(5, 12, size=rng.integers(1, 6)).tolist() for _ in range(60)]
    prefix = write_dataset(tmp_path / "d", [sentences])
    tokenizer = SimpleNamespace(output_size=9, unk_id=1, cls_id=2, sep_id=3)
    sizes, *lines = compare_ngrams(prefix, prefix, tokenizer)  # type: ignore[arg-type]
    assert sizes.startswith(f"{sum(map(len, sentences)) + 60} tokens")
    assert [line.split()[0] for line in lines] == ["forward", "forward", "backward", "backward"]
