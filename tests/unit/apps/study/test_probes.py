"""Probes of made vectors: the layer that holds the tags is found, and words by heart are told from tags."""

from __future__ import annotations

import numpy as np
import pytest

from ctxlm_ds.apps.study.probes import TaggedWords, probe

LABELS, WIDTH, WORDS = 5, 16, 40


def tagged(seed: int, sentences: int) -> TaggedWords:
    """Words whose tags do not follow from the word: layer 1 has the tag, layer 0 the word alone."""
    rng = np.random.default_rng(seed)
    of_tag, of_word = (np.random.default_rng(size).normal(size=(size, WIDTH)) for size in (LABELS, WORDS))
    lengths = rng.integers(3, 9, sentences)
    tags, words = rng.integers(LABELS, size=lengths.sum()), rng.integers(WORDS, size=lengths.sum())
    noise = 0.1 * rng.normal(size=(2, len(tags), WIDTH))
    vectors = np.stack([of_word[words] + noise[0], of_tag[tags] + noise[1]], axis=1)
    return TaggedWords(vectors.astype(np.float32), tags, lengths, [f"w{word}" for word in words])


def test_the_layer_with_the_tags_is_found() -> None:
    train, dev = tagged(1, 400), tagged(2, 100)
    found = probe(train, dev, LABELS)
    assert found["best_layer"] == "1" and found["accuracy"]["1"] > 0.97 > 0.5 > found["accuracy"]["0"]
    assert found["accuracy"]["mix"] > 0.8
    for reading, name in (("best-layer", "1"), ("embeddings", "0"), ("mix", "mix"), ("1", "1")):
        items = found["items"][reading]
        assert np.mean(items) == pytest.approx(found["accuracy"][name]) and len(items) == 100
    # The tags are not in the words, so a control task has nothing to read in this layer.
    assert found["selectivity"] > 0.5
    assert found["bits"] < 0.5 * found["uniform_bits"]


def test_control_tags_are_those_of_the_word() -> None:
    train, dev = tagged(1, 50), tagged(2, 50)
    known = dict(zip(train.words, train.controls(LABELS).tolist(), strict=True))
    for word, tag in zip(dev.words, dev.controls(LABELS).tolist(), strict=True):
        assert known.setdefault(word, tag) == tag
    assert len(set(known.values())) == LABELS


def test_a_repetition_gives_the_same_bits() -> None:
    train, dev = tagged(3, 60), tagged(4, 30)
    assert probe(train, dev, LABELS) == probe(train, dev, LABELS)


def test_tags_without_a_layer_that_knows_them_cost_no_less_than_uniform() -> None:
    train, dev = tagged(5, 60), tagged(6, 30)
    blind = TaggedWords(train.vectors[:, :1], train.tags, train.lengths, train.words)
    found = probe(blind, TaggedWords(dev.vectors[:, :1], dev.tags, dev.lengths, dev.words), LABELS)
    assert "mix" not in found["accuracy"] and found["accuracy"]["0"] < 0.5
    assert found["bits"] > 0.9 * found["uniform_bits"]
