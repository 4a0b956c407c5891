"""ELMo in the format of bilm-tf and AllenNLP: options.json and weights.hdf5.

The softmax is not part of it; model.safetensors of the same folder has it. Matrices are [inputs, outputs], gates in
TensorFlow's order (input, cell, forget, output), and one matrix of an LSTM layer reads inputs and state. Sources:
bilm-tf's dump_weights, AllenNLP's ElmoLstm.load_weights and _ElmoCharacterEncoder.

An exported model gives vectors of words and their log-probabilities: a direction reads `<S>` (backward `</S>`) and the
words, and predicts the next word among all words of the softmax; a word outside of them is `<UNK>`. Shape letters: b
rows, s positions, h width.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import OwnFolder, OwnFormat, Tensors, WordLayers
from ctxlm_ds.export.hf_config import INDEX_FILE, SINGLE_FILE, model_files
from ctxlm_ds.export.key_maps import WeightSource
from ctxlm_ds.export.safetensors_files import SafetensorsFiles
from ctxlm_ds.families.elmo.config import CHARACTERS, ELMO, ElmoSection
from ctxlm_ds.families.elmo.layers import HIDDEN, elmo_layers
from ctxlm_ds.installed import check_extra
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerSequence, ModelBuild
from ctxlm_ds.parallel.cross_entropy import chunk_rows
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.kinds.characters import BEGIN, END, UNK, char_ids
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.untrusted_json import open_regular, read_json_object

SOFTMAX = ("softmax.weight", "softmax.bias")
BATCH = 64
States = list[dict[str, Tensor]]
"""The carried tensors of each part of the layers."""


class BilmLayers(WordLayers):
    """The layers of both directions; for vectors they read `<S>`, the words and `</S>`, from states of 0."""

    def __init__(self, opened: OwnFolder, folder: Path) -> None:
        """Build the model; ExportError if a model of words has no tokenizer in its folder."""
        assert isinstance(opened.model, ElmoSection)
        self.model, self._opened, self._folder = opened.model, opened, folder
        self.num_layers, self.width = self.model.num_layers + 1, 2 * self.model.projection_size
        of_characters = partial(char_ids, size=self.model.max_characters)
        self._encode = of_characters if self.model.inputs == "characters" else partial(_word_ids, self._ids)
        layers = elmo_layers(self.model, ModelBuild((), KernelSet({}, "cpu", torch.float32)))
        first = len(layers) - 1 - self.model.num_layers
        stops = list(accumulate([first] + [1] * self.model.num_layers))
        parts = [layers[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
        self._parts = [LayerSequence(part, HIDDEN).eval() for part in parts]
        for part in self._parts:
            for name, parameter in part.named_parameters():
                parameter.data.copy_(opened.source.read_full(name))

    @torch.no_grad()
    def __call__(self, sentences: Sequence[Sequence[str]]) -> list[NDArray[np.float32]]:
        enclosed = [[BEGIN, *words, END] for words in sentences]
        fields = self._fields(enclosed)
        layers: list[tuple[Tensor, Tensor]] = []
        for part in self._parts:
            found = part.run(fields)
            layers.append((found[HIDDEN[0]], found[HIDDEN[1]]))
            fields = found
        return [_of_words(layers, row, len(words)) for row, words in enumerate(sentences)]

    def _fields(self, sentences: Sequence[Sequence[str]]) -> dict[str, Tensor]:
        """Return both directions' inputs, each filled up behind its last word."""
        longest = max(map(len, sentences))
        names = ("character_ids", "reversed_character_ids")
        if self.model.inputs == "words":
            names = ("input_ids", "reversed_input_ids")
        encoded = [self._encode(words) for words in sentences]
        fields = {}
        for name, step in zip(names, (1, -1), strict=True):
            table = np.zeros((len(encoded), longest, *encoded[0].shape[1:]), dtype=np.int64)
            for row, ids in zip(table, encoded, strict=True):
                row[: len(ids)] = ids[::step]
            fields[name] = torch.from_numpy(table)
        return fields

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if not (self._folder / "tokenizer.json").is_file():
            raise ExportError(f"{self._folder}: no tokenizer.json, whose ids the model's table of words has; "
                              "export it again")  # fmt: skip
        return load_tokenizer(self._folder)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return self._tokenizer.backend.get_vocab()

    def split(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        return list(self._tokenizer.backend.pre_tokenizer.pre_tokenize_str(text))

    @torch.no_grad()
    def log_probs(
        self, sentences: Sequence[Sequence[str]], before: Sequence[Sequence[str]]
    ) -> list[NDArray[np.float64]]:
        if not set(SOFTMAX) <= set(self._opened.source.names()):
            raise ExportError(f"{self._folder}: no {SOFTMAX[0]} in model.safetensors; export it again")
        states: States = [{} for _ in self._parts]
        path = self._folder / "config.json"
        if not (path.is_file() and read_json_object(path, ExportError).get("state_dropout")):
            for words in before:
                _, states = self._read([words], states)
        order = sorted(range(len(sentences)), key=lambda at: len(sentences[at]))
        found: dict[int, NDArray[np.float64]] = {}
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            found |= zip(batch, self._of_batch([sentences[at] for at in batch], states), strict=True)
        return [found[at] for at in range(len(sentences))]

    def _of_batch(self, sentences: Sequence[Sequence[str]], states: States) -> list[NDArray[np.float64]]:
        size, _ = self._opened.source.shape(SOFTMAX[0])
        numbers = [_word_ids(self._ids, words) for words in sentences]
        targets = [torch.from_numpy(np.where(row < size, row, self._ids[UNK])) for row in numbers]
        (ahead, back), _ = self._read(sentences, states)
        forward = self._chosen(ahead, targets)
        backward = [row.flip(0) for row in self._chosen(back, [row.flip(0) for row in targets])]
        return [torch.stack(both).numpy() for both in zip(forward, backward, strict=True)]

    def _chosen(self, hidden: Tensor, targets: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the fp64 log-probability of each row's targets, which its first hidden states [b, s, h] predict."""
        table, bias = (self._opened.source.read_full(name).float() for name in SOFTMAX)
        flat = torch.cat([row[: len(own)] for row, own in zip(hidden, targets, strict=True)])
        size = chunk_rows(len(flat), len(table), flat.device) or 1
        chunks = zip(flat.split(size), torch.cat(list(targets)).split(size), strict=True)
        values = [F.cross_entropy(F.linear(x, table, bias), own, reduction="none") for x, own in chunks]
        return (-torch.cat(values).double()).split([len(own) for own in targets])

    def _read(self, sentences: Sequence[Sequence[str]], states: States) -> tuple[tuple[Tensor, Tensor], States]:
        """Return the last layer's outputs [b, s, h] of both directions, and the states after the last words."""
        (forward, ahead), _ = self._fields([[BEGIN, *words] for words in sentences]).items()
        _, (backward, back) = self._fields([[*words, END] for words in sentences]).items()
        fields, after = {forward: ahead, backward: back}, []
        for part, held in zip(self._parts, states, strict=True):
            part.carried.begin_evaluation()
            for name, state in held.items():
                part.carried.put(name, state.expand(len(sentences), -1).contiguous())
            fields = part.run(fields)
            after.append({name: x for name in part.carried.names if (x := part.carried.take(name)) is not None})
            part.carried.end_evaluation()
        return (fields[HIDDEN[0]], fields[HIDDEN[1]]), after


def _of_words(layers: Sequence[tuple[Tensor, Tensor]], row: int, count: int) -> NDArray[np.float32]:
    """Return [layers, words, 2p] of a row: both directions of each word, without the sentence's ends."""
    both = [
        torch.cat([ahead[row, 1 : count + 1], back[row, : count + 2].flip(0)[1 : count + 1]], dim=-1)
        for ahead, back in layers
    ]
    return torch.stack(both).numpy()


def _word_ids(ids: Mapping[str, int], words: Sequence[str]) -> NDArray[np.integer]:
    return np.array([ids.get(word, ids[UNK]) for word in words], dtype=np.int64)


OPTIONS, WEIGHTS = "options.json", "weights.hdf5"
MAX_COMPRESSION = 50
"""HDF5 reads chunks that a file does not have as zeros: a few kB can declare any number of them."""
DIRECTIONS = ("forward", "backward")
LSTM_OPTIONS = {
    "cell_clip": "cell_clip", "cell_size": "dim", "num_layers": "n_layers", "projection_clip": "proj_clip",
    "projection_size": "projection_dim", "residual": "use_skip_connections",
}  # fmt: skip
CNN_OPTIONS = {"filters": "filters", "max_characters": "max_characters_per_token", "num_highways": "n_highway"}
"""Our setting -> theirs, in the order of their files."""
TENSORFLOW_GATES = (0, 2, 1, 3)
"""Places of TensorFlow's gates in torch's order, and of torch's in TensorFlow's."""
Kind = Literal["same", "matrix", "filter", "gates", "gate_bias"]


@dataclass(frozen=True)
class Dataset:
    """A dataset of the file, and those of our parameters that it holds."""

    name: str
    ours: tuple[str, ...]
    kind: Kind

    def to_theirs(self, values: list[Tensor]) -> Tensor:
        """Return the dataset's value."""
        return KINDS[self.kind][0](values[0] if len(values) == 1 else torch.cat(values, dim=1))

    def to_ours(self, value: Tensor, inputs: int) -> dict[str, Tensor]:
        """Return our parameters; `inputs` is the width of what an LSTM layer reads."""
        found = KINDS[self.kind][1](value)
        parts = [found] if len(self.ours) == 1 else found.split([inputs, found.shape[1] - inputs], dim=1)
        return dict(zip(self.ours, parts, strict=True))


def _reordered(gates: Tensor) -> Tensor:
    parts = gates.chunk(len(TENSORFLOW_GATES))
    return torch.cat([parts[place] for place in TENSORFLOW_GATES])


KINDS: dict[Kind, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "same": (lambda x: x, lambda x: x),
    "matrix": (Tensor.t, Tensor.t),
    "filter": (lambda x: x.permute(2, 1, 0)[None], lambda x: x[0].permute(2, 1, 0)),
    "gates": (lambda x: _reordered(x).t(), lambda x: _reordered(x.t())),
    "gate_bias": (_reordered, _reordered),
}
"""What makes their values of ours, and ours of theirs."""


def datasets(model: ElmoSection) -> Iterator[Dataset]:
    if model.inputs == "words":
        yield Dataset("embedding", ("word_embeddings.weight",), "same")
    else:
        yield from _character_datasets(model)
    for (direction, name), layer in ((each, n) for each in enumerate(DIRECTIONS) for n in range(model.num_layers)):
        theirs = f"RNN_{direction}/RNN/MultiRNNCell/Cell{layer}/LSTMCell"
        ours = f"lstm.{layer}.{name}_lstm"
        yield Dataset(f"{theirs}/W_0", (f"{ours}.weight_ih", f"{ours}.weight_hh"), "gates")
        yield Dataset(f"{theirs}/B", (f"{ours}.bias",), "gate_bias")
        yield Dataset(f"{theirs}/W_P_0", (f"{ours}.weight_hr",), "matrix")


def _character_datasets(model: ElmoSection) -> Iterator[Dataset]:
    yield Dataset("char_embed", ("characters.table.weight",), "same")
    for number in range(len(model.filters)):
        yield Dataset(f"CNN/W_cnn_{number}", (f"characters.filters.{number}.weight",), "filter")
        yield Dataset(f"CNN/b_cnn_{number}", (f"characters.filters.{number}.bias",), "same")
    for number in range(model.num_highways):
        for part in ("carry", "transform"):
            ours = f"characters.highways.{number}.{part}"
            yield Dataset(f"CNN_high_{number}/W_{part}", (f"{ours}.weight",), "matrix")
            yield Dataset(f"CNN_high_{number}/b_{part}", (f"{ours}.bias",), "same")
    yield Dataset("CNN_proj/W_proj", ("characters.projection.weight",), "matrix")
    yield Dataset("CNN_proj/b_proj", ("characters.projection.bias",), "same")


class BilmFormat(OwnFormat):
    """Conversion to and from bilm-tf's files."""

    title = "options.json and weights.hdf5 of bilm-tf and AllenNLP"
    loading = 'allennlp.modules.elmo.Elmo("{folder}/options.json", "{folder}/weights.hdf5", 1)'

    def claims(self, folder: Path) -> bool:
        return (folder / OPTIONS).is_file() and (folder / WEIGHTS).is_file()

    def write(self, folder: Path, model: ModelSection, source: WeightSource) -> None:
        assert isinstance(model, ElmoSection)
        _check(model)
        (folder / OPTIONS).write_text(json.dumps(options_of(model), indent=1) + "\n", encoding="utf-8")
        with _hdf5(folder / WEIGHTS, "w") as file:
            for dataset in datasets(model):
                value = dataset.to_theirs([source.read_full(name) for name in dataset.ours])
                file.create_dataset(dataset.name, data=value.float().contiguous().numpy())

    def open(self, folder: Path) -> OwnFolder:
        model = _section(read_json_object(folder / OPTIONS, ExportError), folder)
        tensors: dict[str, Tensor] = {}
        with open_regular(folder / WEIGHTS), _hdf5(folder / WEIGHTS, "r") as file:
            for dataset in datasets(model):
                if dataset.name not in file:
                    raise ExportError(f"{folder / WEIGHTS} has no {dataset.name}, which {OPTIONS} describes")
                size_bytes = getattr(file[dataset.name], "nbytes", 0)
                if size_bytes > MAX_COMPRESSION * file.id.get_filesize():
                    raise ExportError(f"{folder / WEIGHTS}: {dataset.name} has {size_bytes:,} bytes, which a file of "
                                      f"{file.id.get_filesize():,} does not hold: copy it again")  # fmt: skip
                tensors |= _parameters(file, dataset, model.projection_size, folder / WEIGHTS)
        if (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file():
            files = SafetensorsFiles(model_files(folder))
            tensors |= {name: files.read(name) for name in SOFTMAX if name in files.shapes}
        found = {name: value.contiguous() for name, value in tensors.items()}
        if SOFTMAX[0] in found:
            model = model.model_copy(update={"vocab_size": len(found[SOFTMAX[0]])})
        return OwnFolder(Tensors(found), model, tuple(sorted(ELMO.outputs)))

    def word_layers(self, folder: Path) -> WordLayers:
        return BilmLayers(self.open(folder), folder)


def options_of(model: ElmoSection) -> dict[str, Any]:
    """Return the options of a model; programs that load it count its characters from 1, with 0 for padding."""
    found: dict[str, Any] = {
        "bidirectional": True,
        "dropout": model.dropout,
        "lstm": {theirs: getattr(model, ours) for ours, theirs in LSTM_OPTIONS.items()},
        "n_tokens_vocab": model.vocab_size,
    }
    if model.num_sampled is not None:
        found["n_negative_samples_batch"] = model.num_sampled
    if model.inputs == "characters":
        others = {"activation": "relu", "embedding": {"dim": model.character_size}, "n_characters": CHARACTERS + 1}
        settings = {theirs: getattr(model, ours) for ours, theirs in CNN_OPTIONS.items()}
        found["char_cnn"] = dict(sorted((others | settings).items()))
    return found


def _section(options: dict[str, Any], folder: Path) -> ElmoSection:
    """Return the section of options. Raises ExportError if they describe no model of this family."""
    try:
        lstm, cnn = options["lstm"], options.get("char_cnn")
        settings: dict[str, Any] = {ours: lstm.get(theirs) for ours, theirs in LSTM_OPTIONS.items()} | {
            "residual": bool(lstm.get("use_skip_connections")), "inputs": "words" if cnn is None else "characters",
            "vocab_size": options.get("n_tokens_vocab") or 1, "num_sampled": options.get("n_negative_samples_batch"),
        }  # fmt: skip
        if cnn is not None:
            if cnn["activation"] != "relu":
                raise ExportError(f"{folder / OPTIONS}: activation {cnn['activation']!r}; only relu is computed here")
            settings |= {ours: cnn.get(theirs) for ours, theirs in CNN_OPTIONS.items()}
            settings["character_size"] = cnn["embedding"]["dim"]
        model = ElmoSection.model_validate(settings)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ExportError(f"{folder / OPTIONS} describes no model of bilm-tf: {error}") from error
    return model


def _parameters(file: Any, dataset: Dataset, inputs: int, path: Path) -> dict[str, Tensor]:
    """Read our parameters of a dataset. Raises ExportError if it is damaged, or of another shape."""
    try:
        return dataset.to_ours(torch.from_numpy(file[dataset.name][...]).float(), inputs)
    except (IndexError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ExportError(f"{path}: {dataset.name} does not fit {OPTIONS} ({error}): copy both again") from error


def _check(model: ElmoSection) -> None:
    """Raise ExportError if bilm-tf would compute another model."""
    if model.cell_size <= model.projection_size:
        raise ExportError(
            f"model.cell_size {model.cell_size} is not above model.projection_size {model.projection_size}: bilm-tf "
            "has no projection then"
        )
    width = sum(number for _, number in model.filters)
    if model.inputs == "characters" and width <= model.projection_size:
        raise ExportError(
            f"model.filters are {width}, not above model.projection_size {model.projection_size}: bilm-tf projects "
            "only to fewer"
        )


def _hdf5(path: Path, mode: Literal["r", "w"]) -> Any:
    check_extra("elmo", ["h5py"])
    import h5py

    try:
        return h5py.File(path, mode)
    except OSError as error:
        if mode == "w":
            raise
        raise ExportError(f"{path} is damaged ({error}): copy it again") from error


FORMAT = BilmFormat()
