"""Words' log-probabilities are those of bilm-tf's model in numpy with the softmax over all words, after a warm-up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from ctxlm_ds.apps.evaluate.scorers import open_scorer
from ctxlm_ds.errors import ExportError
from ctxlm_ds.families.elmo.export import FORMAT
from ctxlm_ds.tokenizers.kinds.characters import CharacterSettings, char_ids, train_characters
from tests.numpy_bilm import NumpyBilm
from tests.unit.families.elmo.test_export import section, weights_of

TEXT = "the river was a mountain , and the best of it was the worst ."
SENTENCES = ["the river was it .", "a zebra,the worst", "best", ""]
WARM_UP = ["the worst of it .", "a river , a mountain"]
UNKNOWN = 2
SOFTMAX = ("softmax.weight", "softmax.bias")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words = train_characters([TEXT], CharacterSettings(12, input_words=3))
    words.save(tmp_path)
    model = section(vocab_size=12)
    source = weights_of(model)
    FORMAT.write(tmp_path, model, source)
    save_file({name: source.read_full(name) for name in SOFTMAX}, tmp_path / "model.safetensors")
    return tmp_path


class Bilm(NumpyBilm):
    """The model in numpy, with the log-probability of each next word."""

    def __init__(self, folder: Path, source: dict[str, np.ndarray]) -> None:
        super().__init__(folder)
        self.table, self.bias = np.float64(source["weight"]), np.float64(source["bias"])
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        self.ids = {word: number for word, number in vocabulary.items() if number < len(self.table)}
        self.size = self.options["char_cnn"]["max_characters_per_token"]

    def log_probs(self, before: list[str], words: list[str], direction: int) -> list[float]:
        """The log-probabilities of words after what was read before, in the order of reading."""
        given = [*before, ("<S>", "</S>")[direction], *words]
        top = self.layers(self.vectors(char_ids(given, self.size)[None]), direction)[-1][0]
        logits = top[len(before) : len(given) - 1] @ self.table.T + self.bias
        norms = np.log(np.exp(logits).sum(-1))
        found = zip(logits, norms, words, strict=True)
        return [float(row[self.ids.get(word, UNKNOWN)] - norm) for row, norm, word in found]


def split(text: str) -> list[str]:
    return text.replace(",", " , ").split()


@pytest.mark.parametrize("warm", [True, False])
def test_both_directions_are_those_of_the_model_in_numpy(folder: Path, warm: bool) -> None:
    model = section(vocab_size=12)
    weights = weights_of(model)
    source = {name.partition(".")[2]: weights.read_full(name).numpy() for name in SOFTMAX}
    if not warm:
        (folder / "config.json").write_text(json.dumps({"state_dropout": 0.1}))
    numpy_model, wanted = Bilm(folder, source), []
    ahead = [word for text in WARM_UP for word in ("<S>", *split(text))] if warm else []
    back = [word for text in WARM_UP for word in ("</S>", *reversed(split(text)))] if warm else []
    for text in SENTENCES:
        words = split(text)
        both = numpy_model.log_probs(ahead, words, 0), numpy_model.log_probs(back, words[::-1], 1)[::-1]
        wanted.append([sum(side) for side in both])
    assert "zebra" not in numpy_model.ids and numpy_model.ids["<UNK>"] == UNKNOWN
    for way, column in (("forward", 0), ("backward", 1)):
        found = open_scorer(folder, way=way, warm_up=WARM_UP).scores(SENTENCES)
        np.testing.assert_allclose(found, [one[column] for one in wanted], rtol=1e-5)
    found = open_scorer(folder, warm_up=WARM_UP)
    np.testing.assert_allclose(found.scores(SENTENCES), [sum(one) for one in wanted], rtol=1e-5)
    (tokens,) = found.tokens(SENTENCES[1:2])
    assert [SENTENCES[1][start:end] for start, end in tokens.spans] == ["a", "zebra", ",", "the", "worst"]


def test_a_model_without_its_softmax_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ExportError, match=r"no softmax\.weight in model\.safetensors"):
        FORMAT.word_layers(folder).log_probs([["a"]], [])
