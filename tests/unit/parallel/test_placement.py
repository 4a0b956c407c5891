"""Which rows and columns tensor-parallel ranks have, against torch's own cuts and megatron-core's vocabulary ranges."""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel.utils import VocabUtility

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.models.program import plain_program
from ctxlm_ds.parallel.placement import ROWS, Shard, Split, shard_of, vocabulary_rows_per_rank
from tests.encoder_batches import OUTPUTS
from tests.rank_files import local_shape
from tests.sections import model_section

MODEL = model_section(
    vocab_size=61, hidden_size=16, num_layers=2, num_attention_heads=4, intermediate_size=32, max_position_embeddings=8
)
WHOLE = plain_program(MODEL, OUTPUTS)
SPLITS = {name: facts.split for name, facts in WHOLE.facts.items()}


def parameters() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in WHOLE.shapes.items()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_have_everything_once_or_all_of_it(size: int) -> None:
    for name, value in parameters().items():
        shards = [shard_of(name, SPLITS[name], value.shape, size, rank) for rank in range(size)]
        if SPLITS[name] is None:
            assert all(shard.is_whole for shard in shards), name
            continue
        again = torch.full_like(value, float("nan"))
        for shard in shards:
            shard.place(again, shard.extract(value))
        assert torch.equal(again, value), name
        assert sum(shard.num_elements for shard in shards) == value.numel(), name


@pytest.mark.parametrize("size", [2, 4])
def test_the_cuts_are_those_of_the_heads_rows_and_columns(size: int) -> None:
    values = parameters()
    for rank in range(size):

        def part(name: str, rank: int = rank) -> torch.Tensor:
            shard = shard_of(name, SPLITS[name], values[name].shape, size, rank)
            return shard.extract(values[name]).reshape(local_shape(shard))

        for kind in ("weight", "bias"):
            name = f"encoder.1.attention.qkv.{kind}"
            heads = [matrix.chunk(size)[rank] for matrix in values[name].chunk(3)]
            assert torch.equal(part(name), torch.cat(heads))
            name = f"encoder.0.mlp.up.{kind}"
            assert torch.equal(part(name), values[name].chunk(size)[rank])
        for name in ("encoder.0.attention.output.weight", "encoder.1.mlp.down.weight"):
            assert torch.equal(part(name), values[name].chunk(size, dim=1)[rank])


@pytest.mark.parametrize("size", [2, 3])
def test_blocks_of_different_heights_are_split_each_on_its_own(size: int) -> None:
    """Grouped query attention: fewer rows of keys and values than of queries."""
    value = torch.randn(24, 5)
    for rank in range(size):
        shard = shard_of("qkv", Split("rows", (12, 6, 6)), value.shape, size, rank)
        expected = torch.cat([block.chunk(size)[rank] for block in value.split([12, 6, 6])])
        assert torch.equal(shard.extract(value).reshape(local_shape(shard)), expected)


VOCABULARIES = [(61, 2, 1), (61, 4, 8), (64, 4, 1), (5, 4, 2), (30522, 8, 128)]


@pytest.mark.parametrize(("vocab", "size", "multiple"), VOCABULARIES)
def test_vocabulary_rows_are_megatrons_of_the_padded_table(vocab: int, size: int, multiple: int) -> None:
    table, bias = SPLITS["word_embeddings.weight"], SPLITS["mlm_bias.bias"]
    height = vocabulary_rows_per_rank(vocab, size, multiple)
    assert height % multiple == 0 and height * size >= vocab > (height - multiple) * size
    for rank in range(size):
        first, last = VocabUtility.vocab_range_from_global_vocab_size(height * size, rank, size)
        shard = shard_of("word_embeddings.weight", table, (vocab, 3), size, rank, multiple)
        expected = Shard((vocab, 3), ((min(first, vocab), min(last, vocab)),), (0, 3))
        assert shard == expected
        assert shard_of("mlm_bias.bias", bias, (vocab,), size, rank, multiple).rows == expected.rows


def test_what_cannot_be_split_evenly_is_refused() -> None:
    name = "encoder.0.mlp.up.weight"
    with pytest.raises(ConfigError, match=r"encoder.0.mlp.up.weight: 10 cannot be split into 4 equal parts"):
        shard_of(name, ROWS, (10, 4), 4, 0)
    with pytest.raises(ConfigError, match=r"encoder.0.mlp.up.weight: 6 cannot be split into 4 equal parts"):
        shard_of(name, Split("rows", (8, 6)), (14, 4), 4, 0)
    with pytest.raises(ValueError):
        shard_of(name, ROWS, (8, 4), 4, 4)
    with pytest.raises(ValueError, match="do not add up to 8 rows"):
        shard_of(name, Split("rows", (2, 4)), (8, 4), 2, 0)
