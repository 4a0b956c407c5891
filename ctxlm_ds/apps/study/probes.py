"""Linear probes of frozen layers on tagged words: accuracy, selectivity, and description length.

Each probe is a linear layer over one layer of a model, or over a trained mix of all. Shape letters: w words, k layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.features.kinds import FrozenModel, HeadSettings, InputShape
from ctxlm_ds.apps.downstream.features.sources import FeatureSource
from ctxlm_ds.apps.study.definition import MIX
from ctxlm_ds.apps.study.statistics import items_of

EPOCHS, FEWEST_STEPS, BATCH, RATE, SEED = 8, 200, 256, 5e-3, 0
PORTIONS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
"""Ends of the portions of the online code (Voita and Titov 2020, section 3.2)."""
Vectors = NDArray[np.float32]
Tags = NDArray[np.int64]


@dataclass(frozen=True)
class TaggedWords:
    """Vectors [w, k, width] of words, their tags [w], and the words of each sentence."""

    vectors: Vectors
    tags: Tags
    lengths: NDArray[np.int64]
    words: Sequence[str]

    @classmethod
    def of(cls, source: FeatureSource, examples: Sequence[Example], labels: Sequence[str]) -> TaggedWords:
        """Compute the vectors of sentences; other tags than the labels count as one more."""
        number = {label: at for at, label in enumerate(labels)}
        sentences = [list(example.words) for example in examples]
        vectors = np.concatenate([found.swapaxes(0, 1) for found in source.vectors(sentences)])
        tags = [number.get(tag, len(labels)) for example in examples for tag in example.tags]
        return cls(vectors, np.array(tags), np.array(list(map(len, sentences))), [w for one in sentences for w in one])

    def controls(self, num_labels: int) -> Tags:
        """Return a tag for each word that is the same in every sentence (Hewitt and Liang 2019, section 2)."""
        return np.array([np.random.default_rng([SEED, *word.encode()]).integers(num_labels) for word in self.words])


def probe(train: TaggedWords, dev: TaggedWords, num_labels: int) -> dict[str, Any]:
    """Return figures of the probes of each layer and of the mix, and `items`: the score of each by sentence.

    The mean of the items is the accuracy; `best-layer` is the layer with the highest. Selectivity is its accuracy minus
    that of a probe of the same layer for control tags; `bits` is the length of the training tags in the online code,
    `uniform_bits` without a model.
    """
    layers: dict[str, list[int]] = {str(layer): [layer] for layer in range(train.vectors.shape[1])}
    every = layers | ({MIX: list(range(train.vectors.shape[1]))} if len(layers) > 1 else {})
    right = {name: _right(train, dev, chosen, num_labels) for name, chosen in every.items()}
    accuracy = {name: float(of_words.mean()) for name, of_words in right.items()}
    best = max(layers, key=lambda name: accuracy[name])
    control = _fit(train.vectors[:, layers[best]], train.controls(num_labels), num_labels)
    control_right = _predict(control, dev.vectors[:, layers[best]]).argmax(-1).numpy() == dev.controls(num_labels)
    items = {name: by_sentence(of_words, dev.lengths) for name, of_words in right.items()}
    return {
        "accuracy": accuracy, "best_layer": best, "selectivity": accuracy[best] - float(control_right.mean()),
        "bits": _code_length(train, layers[best], num_labels), "uniform_bits": len(train.tags) * log2(num_labels),
        "items": items | {"best-layer": items[best], "embeddings": items["0"]},
    }  # fmt: skip


def by_sentence(right: NDArray[np.bool_], lengths: NDArray[np.int64]) -> list[float]:
    """Return a score of each sentence; their mean is the share of right words."""
    sentences = np.add.reduceat(right.astype(np.float64), np.cumsum(lengths) - lengths)
    return [float(value) for value in items_of(sentences / lengths, lengths)]


def _right(train: TaggedWords, dev: TaggedWords, layers: Sequence[int], num_labels: int) -> NDArray[np.bool_]:
    model = _fit(train.vectors[:, layers], train.tags, num_labels)
    return np.asarray(_predict(model, dev.vectors[:, layers]).argmax(-1).numpy() == dev.tags)


def _code_length(train: TaggedWords, layers: Sequence[int], num_labels: int) -> float:
    """Return the bits of the training tags, each portion coded by a probe of those before it."""
    order = np.random.default_rng(SEED).permutation(len(train.tags))
    ends = sorted({max(1, round(share * len(order))) for share in PORTIONS})
    bits = ends[0] * log2(num_labels)
    for end, after in zip(ends, ends[1:], strict=False):
        known, coded = order[:end], order[end:after]
        model = _fit(train.vectors[known][:, layers], train.tags[known], num_labels)
        logs = _predict(model, train.vectors[coded][:, layers]).log_softmax(-1).numpy()
        bits -= float(logs[np.arange(len(coded)), train.tags[coded]].sum()) / np.log(2)
    return bits


def _fit(vectors: Vectors, tags: Tags, num_labels: int) -> FrozenModel:
    """Train a probe: Adam, whose rate goes down linearly; the same words and tags give the same probe."""
    torch.manual_seed(SEED)
    shape = InputShape(vectors.shape[1], vectors.shape[2])
    model = FrozenModel(shape, HeadSettings("none", dropout=0.0), num_labels, "tags")
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    batches = list(_batches(len(tags)))
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / len(batches))
    for places in batches:
        words, labels = (torch.from_numpy(values[places])[:, None] for values in (vectors, tags))
        found = model(words, torch.ones(len(places)), labels=labels)
        optimizer.zero_grad()
        found["loss"].backward()
        optimizer.step()
        rate.step()
    return model


def _batches(count: int) -> Iterator[NDArray[np.int64]]:
    rng = np.random.default_rng(SEED)
    for _ in range(max(EPOCHS, ceil(FEWEST_STEPS / ceil(count / BATCH)))):
        yield from np.split(rng.permutation(count), range(BATCH, count, BATCH))


@torch.no_grad()
def _predict(model: FrozenModel, vectors: Vectors) -> torch.Tensor:
    words = torch.from_numpy(np.ascontiguousarray(vectors))
    logits: torch.Tensor = model.eval()(words[:, None], torch.ones(len(words)))["logits"]
    return logits[:, 0]
