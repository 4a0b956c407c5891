"""bilm-tf's model in numpy, written from its definition.

It knows the exported files only: characters, convolution, highway layers, projection, clipped LSTM layers, and the
three layers of representations.
"""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np

from ctxlm_ds.families.elmo.config import CHARACTERS

Array = np.ndarray


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


class NumpyBilm:
    """bilm-tf's model from its files, in float64."""

    def __init__(self, folder: Path) -> None:
        self.options = json.loads((folder / "options.json").read_text())
        self.values: dict[str, Array] = {}
        with h5py.File(folder / "weights.hdf5", "r") as file:
            file.visititems(
                lambda name, x: self.values.__setitem__(name, np.float64(x)) if hasattr(x, "shape") else None
            )

    def vectors(self, ids: Array) -> Array:
        """Character ids [b, s, c], of which 0 is padding, to [b, s, p]."""
        cnn = self.options["char_cnn"]
        table = np.concatenate([np.zeros((1, cnn["embedding"]["dim"])), self.values["char_embed"]])
        assert len(table) == cnn["n_characters"] == CHARACTERS + 1
        characters, parts = table[ids], []
        for number, (width, _) in enumerate(cnn["filters"]):
            kernel, count = self.values[f"CNN/W_cnn_{number}"][0], ids.shape[-1] - width + 1
            windows = np.stack([characters[..., p : p + width, :] for p in range(count)], axis=-3)
            convolved = np.einsum("...pwd,wdf->...pf", windows, kernel) + self.values[f"CNN/b_cnn_{number}"]
            parts.append(np.maximum(convolved.max(axis=-2), 0))
        x = np.concatenate(parts, axis=-1)
        for number in range(cnn["n_highway"]):
            high = {part: self.values[f"CNN_high_{number}/{part}"] for part in ("W_carry", "b_carry")}
            carry = sigmoid(x @ high["W_carry"] + high["b_carry"])
            transform = (
                x @ self.values[f"CNN_high_{number}/W_transform"] + self.values[f"CNN_high_{number}/b_transform"]
            )
            x = carry * np.maximum(transform, 0) + (1 - carry) * x
        return x @ self.values["CNN_proj/W_proj"] + self.values["CNN_proj/b_proj"]

    def layer(self, x: Array, direction: int, number: int) -> Array:
        """Inputs [b, s, p] of an LSTM layer to its outputs."""
        lstm, place = self.options["lstm"], f"RNN_{direction}/RNN/MultiRNNCell/Cell{number}/LSTMCell"
        h, c = np.zeros((len(x), lstm["projection_dim"])), np.zeros((len(x), lstm["dim"]))
        outputs = []
        for t in range(x.shape[1]):
            gates = np.concatenate([x[:, t], h], axis=1) @ self.values[f"{place}/W_0"] + self.values[f"{place}/B"]
            i, j, f, o = np.split(gates, 4, axis=1)
            c = np.clip(sigmoid(f + 1) * c + sigmoid(i) * np.tanh(j), -lstm["cell_clip"], lstm["cell_clip"])
            h = (sigmoid(o) * np.tanh(c)) @ self.values[f"{place}/W_P_0"]
            h = np.clip(h, -lstm["proj_clip"], lstm["proj_clip"])
            outputs.append(h + x[:, t] if number and lstm["use_skip_connections"] else h)
        return np.stack(outputs, axis=1)

    def layers(self, vectors: Array, direction: int) -> list[Array]:
        found = [vectors]
        for number in range(self.options["lstm"]["n_layers"]):
            found.append(self.layer(found[-1], direction, number))
        return found
