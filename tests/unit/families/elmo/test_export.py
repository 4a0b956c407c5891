"""The exported files read by a forward pass in numpy that was written from bilm-tf's definition, and read back."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ctxlm_ds.errors import ConfigError, ExportError
from ctxlm_ds.export.base import Tensors
from ctxlm_ds.families.elmo.config import CHARACTERS, ELMO, ElmoSection
from ctxlm_ds.families.elmo.export import FORMAT, OPTIONS, WEIGHTS
from ctxlm_ds.families.elmo.layers import HIDDEN, elmo_layers
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerDescription, LayerSequence, ModelBuild
from ctxlm_ds.models.program import Program
from tests.numpy_bilm import NumpyBilm

h5py = pytest.importorskip("h5py")
ROWS, LENGTH, VOCABULARY = 2, 9, 40
Array = np.ndarray


def section(**changes: Any) -> ElmoSection:
    own = {"vocab_size": VOCABULARY, "num_highways": 2, "cell_clip": 0.4, "projection_clip": 0.3, "max_characters": 12}
    return ElmoSection.model_validate(ELMO.tiny()["model"] | own | changes)


def layers_of(model: ElmoSection) -> list[LayerDescription]:
    return elmo_layers(model, ModelBuild((), KernelSet({}, "cpu", torch.float32)))


def weights_of(model: ElmoSection) -> Tensors:
    """Large enough that both clips act."""
    torch.manual_seed(1)
    shapes = Program(layers_of(model), tuple(ELMO.outputs)).shapes
    return Tensors({name: torch.randn(shape) * 0.4 for name, shape in shapes.items()})


def our_layers(model: ElmoSection, source: Tensors, fields: dict[str, torch.Tensor]) -> list[dict[str, Array]]:
    """Both directions' tensors after the vectors of words, and after each LSTM layer."""
    layers, found = layers_of(model), []
    for stop in range(len(layers) - 1 - model.num_layers, len(layers)):
        module = LayerSequence(layers[:stop], HIDDEN).eval()
        for name, parameter in module.named_parameters():
            parameter.data.copy_(source.read_full(name))
        with torch.no_grad():
            found.append({name: value.numpy() for name, value in module.run(fields).items()})
    return found


@pytest.mark.parametrize("residual", [True, False])
def test_the_files_give_the_models_three_layers(residual: bool, tmp_path: Path) -> None:
    model = section(residual=residual)
    source = weights_of(model)
    FORMAT.write(tmp_path, model, source)
    numpy_model = NumpyBilm(tmp_path)
    ids = [torch.randint(CHARACTERS + 1, (ROWS, LENGTH, model.max_characters)) for _ in range(2)]
    ours = our_layers(model, source, {"character_ids": ids[0], "reversed_character_ids": ids[1]})
    for direction, name in enumerate(HIDDEN):
        wanted = numpy_model.layers(numpy_model.vectors(ids[direction].numpy()), direction)
        assert len(wanted) == len(ours) == 3
        for got, values in zip(ours, wanted, strict=True):
            np.testing.assert_allclose(got[name], values, rtol=1e-5, atol=1e-5)
    bound = numpy_model.options["lstm"]["proj_clip"]
    assert np.isclose(np.abs(wanted[1]), bound).any() and not np.isclose(np.abs(wanted[1]), bound).all()


def test_names_and_options_are_those_of_bilm_tf(tmp_path: Path) -> None:
    """bin/train_elmo.py's options, and the datasets that bilm/model.py and AllenNLP's elmo.py read."""
    model = section(filters=[[1, 8], [2, 40]], num_highways=1)
    FORMAT.write(tmp_path, model, weights_of(model))
    shapes = {name: value.shape for name, value in NumpyBilm(tmp_path).values.items()}
    cells = [f"RNN_{direction}/RNN/MultiRNNCell/Cell{layer}/LSTMCell" for direction in range(2) for layer in range(2)]
    assert shapes == {
        "char_embed": (261, 8), "CNN/W_cnn_0": (1, 1, 8, 8), "CNN/b_cnn_0": (8,), "CNN/W_cnn_1": (1, 2, 8, 40),
        "CNN/b_cnn_1": (40,), "CNN_high_0/W_carry": (48, 48), "CNN_high_0/b_carry": (48,),
        "CNN_high_0/W_transform": (48, 48), "CNN_high_0/b_transform": (48,), "CNN_proj/W_proj": (48, 32),
        "CNN_proj/b_proj": (32,),
        **{f"{cell}/W_0": (64, 192) for cell in cells}, **{f"{cell}/B": (192,) for cell in cells},
        **{f"{cell}/W_P_0": (48, 32) for cell in cells},
    }  # fmt: skip
    assert json.loads((tmp_path / OPTIONS).read_text()) == {
        "bidirectional": True, "dropout": 0.1, "n_tokens_vocab": VOCABULARY, "n_negative_samples_batch": 16,
        "lstm": {"cell_clip": 0.4, "dim": 48, "n_layers": 2, "proj_clip": 0.3, "projection_dim": 32,
                 "use_skip_connections": True},
        "char_cnn": {"activation": "relu", "embedding": {"dim": 8}, "filters": [[1, 8], [2, 40]],
                     "max_characters_per_token": 12, "n_characters": 262, "n_highway": 1},
    }  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"inputs": "words"}, {"cell_clip": None, "num_sampled": None}])
def test_files_are_read_back_bit_for_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    """All but the softmax."""
    model = section(**changes)
    source = weights_of(model)
    FORMAT.write(tmp_path, model, source)
    assert FORMAT.claims(tmp_path)
    opened = FORMAT.open(tmp_path)
    assert set(opened.source.names()) == set(source.names()) - {"softmax.weight", "softmax.bias"}
    assert all(torch.equal(opened.source.read_full(name), source.read_full(name)) for name in opened.source.names())
    same = ("projection_size", "cell_size", "cell_clip", "projection_clip", "residual", "num_layers", "num_sampled")
    assert all(getattr(opened.model, name) == getattr(model, name) for name in (*same, "inputs", "vocab_size"))


@pytest.mark.parametrize(("changes", "text"), [
    ({"cell_size": 32}, "model.cell_size 32 is not above model.projection_size 32"),
    ({"filters": [[1, 32]]}, "model.filters are 32, not above"),
])  # fmt: skip
def test_models_that_bilm_tf_computes_otherwise_are_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    model = section(**changes)
    with pytest.raises(ExportError, match=text):
        FORMAT.write(tmp_path, model, weights_of(model))


def test_bad_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = section()
    FORMAT.write(tmp_path, model, weights_of(model))
    with h5py.File(tmp_path / WEIGHTS, "a") as file:
        del file["CNN_proj/b_proj"]
    with pytest.raises(ExportError, match=r"weights.hdf5 has no CNN_proj/b_proj"):
        FORMAT.open(tmp_path)
    cell = "RNN_0/RNN/MultiRNNCell/Cell0/LSTMCell"
    for name, value in (
        ("CNN/W_cnn_0", np.zeros((8, 8))), (f"{cell}/W_0", np.zeros((4, 192))), (f"{cell}/B", np.zeros(2)),
        ("CNN_proj/W_proj", np.zeros((2, 3, 4))), ("CNN_proj/W_proj", "text"),
    ):  # fmt: skip
        FORMAT.write(tmp_path, model, weights_of(model))
        with h5py.File(tmp_path / WEIGHTS, "a") as file:
            del file[name]
            file[name] = value
        with pytest.raises(ExportError, match=rf"weights.hdf5: {name} does not fit options.json"):
            FORMAT.open(tmp_path)
    with h5py.File(tmp_path / WEIGHTS, "a") as file:
        del file["CNN_proj/W_proj"]
        file.create_dataset("CNN_proj/W_proj", (100_000, 10_000), "f8", chunks=(1000, 1000))
    with pytest.raises(ExportError, match="CNN_proj/W_proj has 8,000,000,000 bytes, which a file of"):
        FORMAT.open(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"no hdf5")
    with pytest.raises(ExportError, match="weights.hdf5 is damaged"):
        FORMAT.open(tmp_path)
    options = json.loads((tmp_path / OPTIONS).read_text())
    for text, damaged in (
        ("only relu", options | {"char_cnn": options["char_cnn"] | {"activation": "tanh"}}),
        ("describes no model", options | {"lstm": {}}), ("describes no model", {"lstm": [1]}),
    ):  # fmt: skip
        (tmp_path / OPTIONS).write_text(json.dumps(damaged))
        with pytest.raises(ExportError, match=text):
            FORMAT.open(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ConfigError, match=r"^h5py: not installed; pip install 'ctxlm_ds\[elmo\]'"):
        FORMAT.write(tmp_path, model, weights_of(model))
