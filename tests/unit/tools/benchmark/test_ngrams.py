"""Kneser-Ney trigrams against the definition, one n-gram at a time."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.errors import DataError
from tests.sample_data import DatasetWriter, write_dataset
from tests.unit.apps.evaluate.test_word_scorers import ByDefinition
from tools.benchmark.ngrams import compare_ngrams, marked_words, trigram_probabilities

IDS = 6


def test_probabilities_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    text = np.minimum(rng.geometric(0.4, 60), IDS - 1)
    held_out = rng.integers(0, IDS, 200)
    expected = ByDefinition([text.tolist()], 3, IDS, begin=-1, modified=False)
    triples = zip(held_out.tolist(), held_out[1:].tolist(), held_out[2:].tolist(), strict=False)
    found = trigram_probabilities(text, held_out, IDS)
    assert found == pytest.approx([expected.probability((u, v), w) for u, v, w in triples])


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
