"""Checkpoints of many ranks: any layout reads the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ctxlm_ds.checkpoint.manifest import verify
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.checkpoints import make_config, make_tokenizer
from tests.rank_files import (
    KINDS,
    STEP,
    Layout,
    Values,
    checkpoint_of,
    plan_chunks,
    random_states,
    splits_of,
    write_as_ranks,
)

SIZES = {"hidden_size": 32, "num_layers": 4, "num_attention_heads": 8, "intermediate_size": 64}
MANY = Layout(tensor_parallel_size=8, data_parallel_size=32, zero_stage=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer("wordpiece", tmp_path_factory.mktemp("tokenizer") / "t")


@pytest.fixture(scope="module")
def config(tokenizer: Path) -> RunConfig:
    return make_config("bert_nsp", tokenizer, load_tokenizer(tokenizer).vocab_size, SIZES)


@pytest.fixture(scope="module")
def values(config: RunConfig) -> Values:
    return random_states(config)


@pytest.fixture(scope="module")
def plain(config: RunConfig, values: Values, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a single rank."""
    return write_as_ranks(tmp_path_factory.mktemp("plain") / "run", config, values, Layout(), tokenizer)


@pytest.fixture(scope="module")
def many(config: RunConfig, values: Values, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of 256 ranks: tp 8 x dp 32 under ZeRO-3, every parameter in up to 256 chunks."""
    run = write_as_ranks(tmp_path_factory.mktemp("many") / "run", config, values, MANY, tokenizer)
    assert len(list(checkpoint_of(run).glob("weights-*.safetensors"))) == 256
    return run


def assert_holds(run: Path, values: Values) -> None:
    """A verified checkpoint with these weights and moments, bit for bit."""
    verify(checkpoint_of(run))
    reader = CheckpointReader(checkpoint_of(run))
    assert set(reader.names()) == set(values)
    assert reader.scalars() == {"optimizer_updates": STEP}
    for name, kinds in values.items():
        assert reader.kinds(name) == list(KINDS)
        for kind, value in kinds.items():
            assert torch.equal(reader.read_full(name, kind), value), (name, kind)


LAYOUTS = [
    Layout(), Layout(2, 1, 3, 0), Layout(8, 1, 2, 1), Layout(4, 2, 2, 1), Layout(2, 4, 1, 0), Layout(1, 1, 5, 3),
    Layout(2, 1, 2, 2),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_rank_of_any_layout_reads_its_part(
    config: RunConfig, plain: Path, many: Path, values: Values, layout: Layout
) -> None:
    shapes = {name: tuple(kinds["weight"].shape) for name, kinds in values.items()}
    for run in (plain, many):
        reader = CheckpointReader(checkpoint_of(run))
        for _, chunks in plan_chunks(shapes, splits_of(config), layout):
            for name, shard, start, length in chunks:
                for kind in KINDS:
                    expected = shard.extract(values[name][kind])[start : start + length]
                    assert torch.equal(reader.read(name, kind, start, length, shard), expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_the_ranks_of_any_layout_write_is_read_whole(
    config: RunConfig, values: Values, tokenizer: Path, layout: Layout, tmp_path: Path
) -> None:
    assert_holds(write_as_ranks(tmp_path / "run", config, values, layout, tokenizer), values)


def test_what_many_ranks_write_is_read_whole(many: Path, values: Values) -> None:
    assert_holds(many, values)
