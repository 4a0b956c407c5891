"""Checkpoints as the ranks of any layout write them, also as hundreds do: read whole, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ctxlm_ds.checkpoint.manifest import verify
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.checkpoints import make_config, make_tokenizer
from tests.rank_files import KINDS, STEP, Layout, Values, checkpoint_of, random_states, write_as_ranks

SIZES = {"hidden_size": 32, "num_layers": 4, "num_attention_heads": 8, "intermediate_size": 64}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer("wordpiece", tmp_path_factory.mktemp("tokenizer") / "t")


@pytest.fixture(scope="module")
def config(tokenizer: Path) -> RunConfig:
    return make_config("bert_nsp", tokenizer, load_tokenizer(tokenizer).vocab_size, SIZES)


@pytest.fixture(scope="module")
def values(config: RunConfig) -> Values:
    return random_states(config)


LAYOUTS = [
    Layout(), Layout(2, 1, 3, 0), Layout(8, 1, 2, 1), Layout(4, 2, 2, 1), Layout(2, 4, 1, 0), Layout(1, 1, 5, 3),
    Layout(2, 1, 2, 2), Layout(tensor_parallel_size=8, data_parallel_size=32, zero_stage=3),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_the_ranks_of_a_layout_write_is_read_whole(
    config: RunConfig, values: Values, tokenizer: Path, layout: Layout, tmp_path: Path
) -> None:
    """A file of each rank, verified, and these weights and moments, bit for bit."""
    folder = checkpoint_of(write_as_ranks(tmp_path / "run", config, values, layout, tokenizer))
    assert len(list(folder.glob("weights-*.safetensors"))) == layout.world_size
    verify(folder)
    reader = CheckpointReader(folder)
    assert set(reader.names()) == set(values)
    assert reader.scalars() == {"optimizer_updates": STEP}
    for name, kinds in values.items():
        assert reader.kinds(name) == list(KINDS)
        for kind, value in kinds.items():
            assert torch.equal(reader.read_full(name, kind), value), (name, kind)
