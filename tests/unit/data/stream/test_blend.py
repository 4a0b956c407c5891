"""Blends: every row of a source once before any comes again, shares as asked, the same at any place in the stream."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ctxlm_ds.data.stream.blend import (
    MegatronOrder,
    PlannedRows,
    RowOrder,
    RowStream,
    WeightedOrder,
    cycle_length,
    megatron_weights,
    quotas_of,
    stream_shares,
    train_stream,
)
from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.data.stream.run_datasets import build_run_rows, split_documents
from ctxlm_ds.errors import DataError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.source_rules import split_shares
from tests.sample_data import FakeTokenizer, random_documents, run_config, write_dataset
from tests.unit.data.stream.test_loader import Setup, global_rows, steps_of

COUNTS = (1000, 37, 260)


@dataclass
class Rows:
    """As many rows in each source as a RowSource of that size has."""

    counts: tuple[int, ...] = COUNTS

    @property
    def indexes(self) -> list[range]:
        return [range(count) for count in self.counts]

    def __len__(self) -> int:
        return sum(self.counts)


def recipe(blend: str = "concatenate", sources: list[dict[str, Any]] | None = None, **data: Any) -> RunConfig:
    given_sources = sources or [{}, {}, {}]
    train = [{"path": f"s{number}"} | source for number, source in enumerate(given_sources)]
    return run_config(data={"train": train, "blend": blend, **data})


def stream_of(config: RunConfig, counts: tuple[int, ...] = COUNTS) -> RowStream:
    return train_stream(Rows(counts), config.data, config.training)  # type: ignore[arg-type]


def read(stream: RowStream, count: int, first: int = 0) -> PlannedRows:
    return stream.at(np.arange(first, first + count, dtype=np.int64))


def sources_of(rows: NDArray[np.int64], counts: tuple[int, ...] = COUNTS) -> NDArray[np.int64]:
    return np.searchsorted(np.cumsum(counts), rows, side="right")


WEIGHTED = [{"weight": 5}, {"weight": 3}, {"weight": 2}]
EPOCHS = [{"epochs": 0.5}, {"epochs": 4}, {}]
RECIPES = {
    "concatenate": recipe(),
    "epochs": recipe(sources=EPOCHS),
    "weighted": recipe("weighted", WEIGHTED),
    "temperature": recipe("temperature", temperature=2.0),
    "megatron": recipe("megatron", WEIGHTED),
    "megatron by rows": recipe("megatron"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_each_source_s_epochs_hold_every_row_once(name: str) -> None:
    planned = read(stream_of(RECIPES[name]), 30_000)
    sources = sources_of(planned.rows)
    for source, count in enumerate(COUNTS):
        rows, epochs = planned.rows[sources == source], planned.epochs[sources == source]
        assert len(np.unique(np.stack([rows, epochs], axis=1), axis=0)) == len(rows)
        sizes = np.bincount(epochs)
        done = int(epochs.max()) - 8  # an epoch of `epochs` may not be over while later ones of its cycle have begun
        assert done > 1
        assert np.all(sizes[:done] == count)


@pytest.mark.parametrize("name", ["weighted", "temperature", "megatron", "megatron by rows"])
def test_a_source_s_next_epoch_begins_when_the_last_is_over(name: str) -> None:
    planned = read(stream_of(RECIPES[name]), 20_000)
    sources = sources_of(planned.rows)
    for source in range(len(COUNTS)):
        assert np.all(np.diff(planned.epochs[sources == source]) >= 0)


@pytest.mark.parametrize("name", RECIPES)
def test_any_position_alone_and_after_a_restart(name: str) -> None:
    whole = read(stream_of(RECIPES[name]), 70_000)
    places = np.random.default_rng(0).integers(0, 70_000, size=(20, 8))
    picked = stream_of(RECIPES[name]).at(places)
    assert np.array_equal(picked.rows, whole.rows[places])
    assert np.array_equal(picked.epochs, whole.epochs[places])
    late = read(stream_of(RECIPES[name]), 500, 69_500)
    assert np.array_equal(late.rows, whole.rows[69_500:])


def test_the_seed_decides_the_order() -> None:
    for name, config in RECIPES.items():
        other = config.model_copy(update={"training": config.training.model_copy(update={"seed": 8})})
        assert not np.array_equal(read(stream_of(config), 100).rows, read(stream_of(other), 100).rows), name


def test_without_epochs_all_rows_are_one_epoch() -> None:
    stream = stream_of(RECIPES["concatenate"])
    assert isinstance(stream, RowOrder)
    assert sorted(read(stream, sum(COUNTS), sum(COUNTS)).rows) == list(range(sum(COUNTS)))
    assert [stream.epoch_of(position) for position in (0, 1296, 1297, 2593, 2594)] == [0, 0, 1, 1, 2]


def test_in_order_reads_one_source_after_another_in_every_epoch() -> None:
    stream, total = stream_of(recipe("in_order")), sum(COUNTS)
    planned = read(stream, 2 * total, 5)
    assert planned.rows.tolist() == [position % total for position in range(5, 5 + 2 * total)]
    assert planned.epochs.tolist() == [position // total for position in range(5, 5 + 2 * total)]


def test_epochs_are_exact_in_each_cycle() -> None:
    cycle = 500 + 4 * 37 + 260
    stream = stream_of(RECIPES["epochs"])
    for number in range(4):
        planned = read(stream, cycle, number * cycle)
        assert np.bincount(sources_of(planned.rows)).tolist() == [500, 148, 260]
        assert np.all(np.bincount(planned.rows[sources_of(planned.rows) == 1] - 1000) == 4)
    halves = [read(stream, cycle, number * cycle).rows for number in (0, 1)]
    assert sorted(row for half in halves for row in half if row < 1000) == list(range(1000))
    assert stream.epoch_of(cycle - 1) == 0 and stream.epoch_of(cycle) == 1


def test_weights_are_shares_of_every_stretch() -> None:
    planned = read(stream_of(RECIPES["weighted"]), 65_536)
    sources = sources_of(planned.rows)
    assert np.bincount(sources).tolist() == [32_768, 19_661, 13_107]
    for part in np.split(sources, 16):
        assert np.bincount(part) / len(part) == pytest.approx([0.5, 0.3, 0.2], abs=0.04)


@pytest.mark.parametrize(("temperature", "exponent"), [(1.0, 1.0), (2.0, 0.5), (1 / 0.7, 0.7), (100.0, 0.01)])
def test_temperature(temperature: float, exponent: float) -> None:
    expected = np.array(COUNTS) ** exponent / np.sum(np.array(COUNTS) ** exponent)
    planned = read(stream_of(recipe("temperature", temperature=temperature)), 65_536)
    assert np.bincount(sources_of(planned.rows)) / 65_536 == pytest.approx(expected, abs=1e-4)


def test_shares_are_what_the_stream_gives() -> None:
    for name, config in RECIPES.items():
        read_shares = np.bincount(sources_of(read(stream_of(config), 18_160).rows)) / 18_160
        assert stream_shares(Rows(), config.data, config.training) == pytest.approx(read_shares, abs=0.012), name  # type: ignore[arg-type]


def test_a_tiny_share_still_comes_and_a_tiny_source_repeats() -> None:
    order = WeightedOrder([1e6, 1, 1e6], 7)
    assert np.bincount(order.at(np.arange(1 << 20))[0])[1] == 1
    planned = read(stream_of(recipe("weighted", [{"weight": 3}, {"weight": 1}, {"weight": 5}]), (1000, 3, 10)), 900)
    counts = np.bincount(sources_of(planned.rows, (1000, 3, 10)))
    assert int(planned.epochs.max()) == (counts[2] - 1) // 10 > 40


def test_a_source_without_rows_is_named() -> None:
    for config in (RECIPES["weighted"], RECIPES["temperature"], RECIPES["megatron"], RECIPES["epochs"]):
        with pytest.raises(DataError, match="s1 gives no row"):
            stream_of(config, (10, 0, 10))
    assert read(stream_of(recipe(), (10, 0, 10)), 20).rows.max() == 19


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9))
@example([756.0, 2.0, 2.0, 557.0, 560.0, 806.0, 0.001, 0.001, 0.001])
@settings(max_examples=100)
def test_quotas_are_the_nearest_whole_numbers(weights: list[float]) -> None:
    """One source of most rows gives those by which the least shares are raised to a row."""
    total = cycle_length(weights)
    quotas, exact = quotas_of(weights, total), np.array(weights) / sum(weights) * total
    assert int(quotas.sum()) == total
    differences = np.sort(np.abs(quotas - exact))
    assert np.all(differences[:-1] < 1.0)
    assert differences[-1] < 1.0 + np.maximum(1.0 - exact, 0.0).sum()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
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


TOKENIZER: Any = FakeTokenizer()
BLENDS: dict[str, dict[str, Any]] = {
    "weighted": {"sources": [{"weight": 1}, {"weight": 3}]},
    "megatron": {"sources": [{"weight": 1}, {"weight": 3}], "split": "80,20"},
    "concatenate": {"sources": [{}, {"epochs": 2.5}], "packing": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blended")
    for seed, (name, documents) in enumerate((("large", 30), ("small", 5))):
        write_dataset(folder / name, random_documents(documents, sentences=4, seed=seed))
    return folder


def setup(folder: Path, blend: str, **training: Any) -> Setup:
    data = dict(BLENDS[blend], blend=blend, sample_format="doc_sentences", seq_length=32)
    places = [{"path": str(folder / name)} for name in ("large", "small")]
    data["train"] = [place | source for place, source in zip(places, data.pop("sources"), strict=True)]
    config = run_config(data=data, training=training, objective={"name": "masked_lm"})
    objective = build_objective(config.objective, TOKENIZER)
    return build_run_rows(config.row_settings, TOKENIZER, objective).train, objective, config


def rows_of(parts: list[list[Step]]) -> list[bytes]:
    return sum(global_rows(parts), [])


@pytest.mark.parametrize("blend", BLENDS)
def test_ranks_and_a_new_batch_size_change_nothing(folder: Path, blend: str) -> None:
    """Ten steps of 8, then as many rows again in steps of 20 on two ranks: the rows of twenty steps of 8."""
    expected = rows_of([steps_of(setup(folder, blend), 20)])
    first = rows_of([steps_of(setup(folder, blend, micro_batch_size=4), 10)])
    other = setup(folder, blend, global_batch_size=20, micro_batch_size=5)
    then = rows_of([steps_of(other, 4, rank, 2, start_row=80) for rank in range(2)])
    assert first + then == expected


@pytest.mark.parametrize("blend", BLENDS)
def test_masks_change_with_the_source_s_own_epoch(folder: Path, blend: str) -> None:
    """The small source comes round often: its rows come again with other masks."""
    made = setup(folder, blend)
    rows = rows_of([steps_of(made, 40)])
    planned = train_stream(made[0], made[2].data, made[2].training).at(np.arange(320))
    small = planned.rows >= len(made[0].indexes[0])
    assert planned.epochs[small].max() > planned.epochs[~small].max() + 1
    seen: dict[int, set[bytes]] = {}
    for row, content in zip(planned.rows[small].tolist(), np.array(rows, dtype=object)[small], strict=True):
        seen.setdefault(row, set()).add(content)
    times = {row: int(np.sum(planned.rows == row)) for row in seen}
    assert max(times.values()) > 2
    # Short rows have few places to mask, so that some masks come again by chance; fixed ones would be a tenth of this.
    assert sum(map(len, seen.values())) > 0.7 * sum(times.values())
