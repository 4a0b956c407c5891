"""The `megatron` blend and `data.split` against megatron-core's own code, compiled helper included."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.data.stream.blend import MegatronOrder, megatron_weights
from ctxlm_ds.data.stream.run_datasets import split_documents
from ctxlm_ds.recipe.source_rules import split_shares

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets import helpers_cpp
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )
    from megatron.core.datasets.utils import Split, normalize

SIZE = 3 * 65_536 + 1000


class Source:
    """As much of a MegatronDataset as a blend looks at."""

    index_split = Split.train
    unique_identifiers: dict[str, Any] = {}

    def __len__(self) -> int:
        return SIZE


def weights_of(seed: int, sources: int) -> list[float]:
    return (np.random.default_rng(seed).random(sources) ** 4 + 1e-9).tolist()


def theirs(weights: list[Any], size: int = SIZE) -> tuple[Any, Any]:
    """The order of a BlendedDataset, which normalises the weights that it gets."""
    config: Any = SimpleNamespace(path_to_cache=None, defer_npy_index_mmap=False)
    sources: Any = [Source() for _ in weights]
    blended = BlendedDataset(sources, weights, size, config)
    return blended.dataset_index, blended.dataset_sample_index


@pytest.mark.parametrize(
    "weights",
    [
        [1.0],
        [1.0, 1.0],
        [0.3, 0.3, 0.4],
        [70.0, 20.0, 10.0, 0.01],
        weights_of(1, 2),
        weights_of(2, 7),
        weights_of(3, 40),
    ],
)
def test_weights_give_megatron_s_order(weights: list[float]) -> None:
    expected = theirs(normalize(weights))  # BlendedMegatronDatasetConfig normalises them first
    ours = MegatronOrder(megatron_weights(weights, [1] * len(weights))).at(np.arange(SIZE, dtype=np.int64))
    for got, wanted in zip(ours, expected, strict=True):
        assert np.array_equal(got, wanted)


def test_without_weights_rows_are_the_weights() -> None:
    counts = [123_456, 7, 4321]
    expected = theirs(counts)
    ours = MegatronOrder(megatron_weights(None, counts)).at(np.arange(SIZE, dtype=np.int64))
    for got, wanted in zip(ours, expected, strict=True):
        assert np.array_equal(got, wanted)


def test_a_run_made_longer_goes_on_in_the_same_order() -> None:
    """Megatron's index for more steps begins with the one for fewer; ours is asked far behind, then before."""
    weights = megatron_weights([5.0, 3.0, 1.5], [1, 1, 1])
    short, long = (np.zeros(size, np.int16) for size in (SIZE // 2, SIZE))
    for index in (short, long):
        helpers_cpp.build_blending_indices(index, np.zeros(len(index), np.int64), weights, 3, len(index), False)
    assert np.array_equal(short, long[: len(short)])
    order = MegatronOrder(weights)
    places = np.array([SIZE - 1, 0, 65_535, 65_536, 131_072, SIZE - 2, 17])
    assert order.at(places)[0].tolist() == long[places].tolist()
    assert np.array_equal(order.at(np.arange(len(short)))[0], short)


@pytest.mark.parametrize(
    "split", ["969,30,1", "949,50,1", "90,5,5", "1", "99,1", "0.7,0.2,0.1", "100,0,0", "98/2/0", "1,0,1"]
)
def test_splits_are_megatron_s(split: str) -> None:
    fractions = parse_and_normalize_split(split)
    assert list(split_shares(split)) == fractions
    matrix = convert_split_vector_to_split_matrix(fractions)
    for num_documents in (0, 1, 2, 3, 10, 99, 1000, 1001, 12_345_678, 987_654_321_012):
        ours = split_documents(num_documents, split_shares(split))
        for part, bookends in zip(ours, matrix, strict=True):
            if bookends is None:
                assert part[0] == part[1]
            else:  # as _build_megatron_dataset_splits has it
                assert part == tuple(int(round(bookend * float(num_documents))) for bookend in bookends)
        assert [ours[0][0], ours[-1][1]] == [0, num_documents]
