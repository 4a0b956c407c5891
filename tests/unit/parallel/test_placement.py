"""Which rows and columns tensor-parallel ranks have, against torch's own cuts and megatron-core's vocabulary ranges."""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel.utils import VocabUtility

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.kernels.dispatch import choose_kernels
from ctxlm_ds.models.build import build_model
from ctxlm_ds.parallel.placement import is_split, shard_of, split_axis, vocabulary_rows_per_rank
from ctxlm_ds.parallel.shards import Shard
from ctxlm_ds.recipe.schema import KernelsConfig
from tests.sections import model_section

MODEL = model_section(
    vocab_size=61, hidden_size=16, num_layers=2, num_attention_heads=4, intermediate_size=32, max_position_embeddings=8
)


def parameters() -> dict[str, torch.Tensor]:
    kernels = choose_kernels(KernelsConfig(), "cpu", torch.float32, False)
    model = build_model(MODEL, ("masked_lm", "next_sentence"), kernels, seed=0)
    return {name: torch.randn_like(value.detach()) for name, value in model.named_parameters()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_have_everything_once_or_all_of_it(size: int) -> None:
    for name, value in parameters().items():
        shards = [shard_of(name, value.shape, size, rank) for rank in range(size)]
        if not is_split(name):
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
            shard = shard_of(name, values[name].shape, size, rank)
            return shard.extract(values[name]).reshape(shard.local_shape)

        for kind in ("weight", "bias"):
            name = f"encoder.1.attention.qkv.{kind}"
            heads = [matrix.chunk(size)[rank] for matrix in values[name].chunk(3)]
            assert torch.equal(part(name), torch.cat(heads))
            name = f"encoder.0.mlp.up.{kind}"
            assert torch.equal(part(name), values[name].chunk(size)[rank])
        for name in ("encoder.0.attention.output.weight", "encoder.1.mlp.down.weight"):
            assert torch.equal(part(name), values[name].chunk(size, dim=1)[rank])


VOCABULARIES = [(61, 2, 1), (61, 4, 8), (64, 4, 1), (5, 4, 2), (30522, 8, 128)]


@pytest.mark.parametrize(("vocab", "size", "multiple"), VOCABULARIES)
def test_vocabulary_rows_are_megatrons_of_the_padded_table(vocab: int, size: int, multiple: int) -> None:
    height = vocabulary_rows_per_rank(vocab, size, multiple)
    assert height % multiple == 0 and height * size >= vocab > (height - multiple) * size
    for rank in range(size):
        first, last = VocabUtility.vocab_range_from_global_vocab_size(height * size, rank, size)
        shard = shard_of("word_embeddings.weight", (vocab, 3), size, rank, multiple)
        expected = Shard((vocab, 3), ((min(first, vocab), min(last, vocab)),), (0, 3))
        assert shard == expected
        assert shard_of("mlm_bias.bias", (vocab,), size, rank, multiple).rows == expected.rows


def test_names_of_decoders_and_of_what_is_whole() -> None:
    assert split_axis("decoder.11.attention.qkv.weight") == "qkv"
    assert split_axis("decoder.0.mlp.up.bias") == "rows"
    assert split_axis("decoder.0.attention.output.weight") == "columns"
    for name in (
        "decoder.0.attention.output.bias", "encoder.0.mlp.down.bias", "embeddings.position_embeddings.weight",
        "encoder.0.mlp_layer_norm.weight", "heads.pooler.weight", "heads.mlm_transform.weight", "final_layer_norm.bias",
    ):  # fmt: skip
        assert split_axis(name) is None


def test_what_cannot_be_split_evenly_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"encoder.0.mlp.up.weight: 10 cannot be split into 4 equal parts"):
        shard_of("encoder.0.mlp.up.weight", (10, 4), 4, 0)
    with pytest.raises(ValueError):
        shard_of("encoder.0.mlp.up.weight", (8, 4), 4, 4)
