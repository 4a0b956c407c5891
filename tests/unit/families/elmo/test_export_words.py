"""Vectors of words are the layers of bilm-tf's model in numpy, for a sentence between its ends, in any batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.apps.downstream.features.sources import open_source
from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import OwnFormat
from ctxlm_ds.families.elmo.config import ElmoSection
from ctxlm_ds.families.elmo.export import FORMAT
from ctxlm_ds.tokenizers.kinds.characters import CharacterSettings, char_ids, train_characters
from tests.numpy_bilm import NumpyBilm
from tests.unit.families.elmo.test_export import section, weights_of

SENTENCES = [["The", "Fülle", "of", "it"], ["x"], ["a", "b", "c", "d", "e", "f", "characteristically"]]


def write(folder: Path, **changes: object) -> ElmoSection:
    model = section(**changes)
    FORMAT.write(folder, model, weights_of(model))
    return model


def test_vectors_are_those_of_the_model_in_numpy(tmp_path: Path) -> None:
    model = write(tmp_path)
    numpy_model, found = NumpyBilm(tmp_path), FORMAT.word_layers(tmp_path)(SENTENCES)
    size = model.projection_size
    for words, layers in zip(SENTENCES, found, strict=True):
        assert layers.shape == (3, len(words), 2 * size)
        ids = char_ids(["<S>", *words, "</S>"], model.max_characters)[None]
        ahead = numpy_model.layers(numpy_model.vectors(ids), 0)
        back = [each[:, ::-1] for each in numpy_model.layers(numpy_model.vectors(ids[:, ::-1]), 1)]
        for layer, forward, backward in zip(layers, ahead, back, strict=True):
            np.testing.assert_allclose(layer, np.concatenate([forward, backward], -1)[0, 1:-1], rtol=1e-5, atol=1e-5)


def test_a_source_gives_both_directions_or_each(tmp_path: Path) -> None:
    write(tmp_path)
    joined, separate = (list(open_source(tmp_path, separate=each).vectors(SENTENCES)) for each in (False, True))
    for both, each in zip(joined, separate, strict=True):
        assert each.shape == (5, both.shape[1], both.shape[2] // 2)
        assert np.array_equal(both[0], np.concatenate([each[0], each[0]], axis=-1))
        for layer in (1, 2):
            assert np.array_equal(both[layer], np.concatenate([each[2 * layer - 1], each[2 * layer]], axis=-1))
    assert len(list(open_source(tmp_path).vectors([]))) == 0


def test_a_model_of_words_reads_its_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "with"
    write(tmp_path, inputs="words")
    with pytest.raises(ExportError, match=r"no tokenizer\.json, whose ids"):
        FORMAT.word_layers(tmp_path)
    train_characters([" ".join(words) for words in SENTENCES], CharacterSettings(40)).save(folder)
    write(folder, inputs="words")
    known, unknown, other = FORMAT.word_layers(folder)([["a", "it"], ["a", "zzz"], ["a", "yyy"]])
    assert np.array_equal(unknown, other) and not np.array_equal(known[0], unknown[0])


def test_a_format_without_vectors_is_refused(tmp_path: Path) -> None:
    class Other(type(FORMAT)):  # type: ignore[misc]
        title = "other"
        word_layers = OwnFormat.word_layers

    with pytest.raises(ExportError, match=r"models of this format \(other\) give no vectors"):
        Other().word_layers(tmp_path)
