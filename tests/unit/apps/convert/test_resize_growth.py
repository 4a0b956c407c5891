"""ctxlm convert grow: layers repeat, and each part of a matrix is tiled from the middle as ModernBERT's code does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ctxlm_ds.apps.convert.resize import grow, places, source_names, tiled
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.errors import CheckpointError, ConfigError
from ctxlm_ds.export.huggingface import from_hf, to_hf
from ctxlm_ds.export.initial_weights import load_initial_weights
from ctxlm_ds.export.weights import open_checkpoint
from ctxlm_ds.models.program import plain_program
from ctxlm_ds.recipe.schema import ParallelConfig
from tests.checkpoints import make_config, make_tokenizer, random_weights, write_random_run, write_run
from tests.sections import model_section

LARGER = ["model.hidden_size=56", "model.num_attention_heads=7", "model.intermediate_size=201", "model.num_layers=5"]
"""Three more heads and an odd width: no offset is by chance that of whole heads."""


def modernbert_s_tile(old: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """_tile_2d of AnswerDotAI/ModernBERT, `tile_weights_from_middle`, row by row and column by column."""
    height, width = old.shape
    top, left = (rows - height) // 2, (columns - width) // 2
    wide = torch.zeros(height, columns)
    wide[:, left : left + width] = old
    for i in range(left):
        wide[:, i] = wide[:, left + width - 1 - (left - i - 1) % width]
    for i in range(left + width, columns):
        wide[:, i] = wide[:, left + (i - left) % width]
    result = torch.zeros(rows, columns)
    result[top : top + height] = wide
    for i in range(top):
        result[top - 1 - i] = wide[height - 1 - i % height]
    for i in range(top + height, rows):
        result[i] = wide[(i - top) % height]
    return result


def test_a_matrix_is_tiled_from_the_middle() -> None:
    assert tiled(torch.tensor([1, 2, 3]), (8,)).tolist() == [2, 3, 1, 2, 3, 1, 2, 3]
    by_hand = [[4, 3, 4, 3], [2, 1, 2, 1], [4, 3, 4, 3], [2, 1, 2, 1], [4, 3, 4, 3]]
    assert tiled(torch.tensor([[1, 2], [3, 4]]), (5, 4)).tolist() == by_hand
    for rows, columns in ((3, 5), (4, 7), (10, 16)):
        value = torch.randn(3, 5)
        assert torch.equal(tiled(value, (rows, columns)), modernbert_s_tile(value, rows, columns))


def test_heads_stay_whole_and_with_their_keys() -> None:
    """2 heads of keys with 1 query each become 3 with 2: heads 1 0 1 | 0 1 0 in the rule, each with both queries."""
    queries, keys = ((2, 1, 2), (3, 2, 2)), ((2, 2), (3, 2))
    assert places(4, 6, [queries, keys]).tolist() == [0, 1, 2, 3, 0, 1]
    assert places(4, 12, [queries, keys]).tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 0, 1]


def test_layers_repeat_as_gopher_s() -> None:
    small, large = (plain_program(model_section(vocab_size=50, num_layers=n, hidden_size=12), ["predicted_logits"])
                    for n in (3, 7))  # fmt: skip
    names = source_names(small, large)
    weight = "attention.qkv.weight"
    numbers = [int(names[f"encoder.{layer}.{weight}"].split(".")[1]) for layer in range(7)]
    assert numbers == [0, 0, 1, 1, 2, 2, 2]  # 0 3/7 6/7 9/7 12/7 15/7 18/7, rounded, at most 2
    assert names["embeddings.position_embeddings.weight"] == "embeddings.position_embeddings.weight"


@pytest.mark.parametrize("family", ["bert_nsp", "modernbert", "gpt2"])
def test_a_grown_model_is_one_that_exports_and_initializes(family: str, tmp_path: Path) -> None:
    kind = "gpt2" if family == "gpt2" else "wordpiece"
    run = write_random_run(tmp_path / "run", family, make_tokenizer(kind, tmp_path / "tok"))
    source = open_checkpoint(run)
    grow(run, LARGER, tmp_path / "out")
    grown = open_checkpoint(tmp_path / "out")
    assert grown.model.hidden_size == 56 and grown.model.num_layers == 5 and grown.model.vocab_size  # type: ignore[attr-defined]
    assert max(each.relative for each in to_hf(tmp_path / "out", tmp_path / "hf").comparisons) < 1e-5
    loaded = dict(load_initial_weights(tmp_path / "out", grown.model, grown.outputs, dict[str, torch.Tensor]().pop))
    assert all(torch.equal(loaded[name], grown.reader.read_full(name)) for name in grown.reader.names())
    # The queries, keys and values of 7 heads of 8: heads 3 0 1 2 3 0 1 of the old 4, in each of the three.
    block = "decoder" if family == "gpt2" else "encoder"
    old, new = (each.reader.read_full(f"{block}.0.attention.qkv.weight") for each in (source, grown))
    heads = [3, 0, 1, 2, 3, 0, 1]
    columns = [head * 8 + element for head in heads for element in range(8)]
    assert torch.equal(new.view(3, 7, 8, 56), old.view(3, 4, 8, 32)[:, heads][..., columns])
    up, wide = (each.reader.read_full(f"{block}.0.mlp.up.weight") for each in (source, grown))
    parts = 2 if family == "modernbert" else 1
    expected = [tiled(part, (201, 32))[:, columns] for part in up.chunk(parts)]
    assert torch.equal(wide, torch.cat(expected))


def test_equal_sizes_change_nothing_and_an_import_grows(tmp_path: Path) -> None:
    run = write_random_run(tmp_path / "run", "bert", make_tokenizer("wordpiece", tmp_path / "tok"))
    to_hf(run, tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "weights")
    lines = grow(tmp_path / "weights", ["model.num_layers=3"], tmp_path / "out")
    before, after = open_checkpoint(run).reader, CheckpointReader(tmp_path / "out")
    assert all(torch.equal(before.read_full(name), after.read_full(name)) for name in before.names()
               if not name.startswith("encoder."))  # fmt: skip
    for layer, source in enumerate((0, 1, 1)):
        for part in ("attention.qkv.bias", "mlp.down.weight"):
            found = after.read_full(f"encoder.{layer}.{part}")
            assert torch.equal(found, before.read_full(f"encoder.{source}.{part}"))
    assert "parameters became" in lines[0]


def test_the_layout_of_the_run_does_not_matter(tmp_path: Path) -> None:
    layout = ParallelConfig(pipeline_parallel_size=2, pipeline_layers=[1, 1])
    config = make_config("bert", make_tokenizer("wordpiece", tmp_path / "tok"), parallel=layout)
    grow(write_run(tmp_path / "run", config, random_weights(config)), ["model.num_layers=3"], tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").model.num_blocks == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.num_layers=1"], r"model.num_layers=1 \(2 before\): sizes"),
        (["model.family=roberta"], "model.family=roberta .*may grow"),
        (["objective.mask_prob=0.3"], "objective.mask_prob=0.3: sizes"),
        (["model.vocab_size=900"], "vocab_size=900 .*may grow"),
        (["model.max_position_embeddings=80"], "max_position_embeddings=80 .*may grow"),
        (["model.hidden_size=50"], "num_attention_heads: 4 does not divide model.hidden_size 50"),
        (["model.hidden_size=64"], "heads of 16 elements, but they stay complete, of 8"),
        ([], "nothing of model.family bert"),
    ],
)
def test_what_cannot_grow_is_refused(settings: list[str], message: str, tmp_path: Path) -> None:
    run = write_random_run(tmp_path / "run", "bert", make_tokenizer("wordpiece", tmp_path / "tok"))
    with pytest.raises(ConfigError, match=message):
        grow(run, settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="exists and would be overwritten"):
        grow(run, LARGER, tmp_path / "tok")
