"""A new run's weights from a run, a checkpoint, an imported folder or a Hugging Face folder, extended or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from ctxlm_ds.errors import CheckpointError, ExportError
from ctxlm_ds.export.huggingface import from_hf, to_hf
from ctxlm_ds.export.initial_weights import load_initial_moments, load_initial_weights, spread, warn_of_other_tokens
from ctxlm_ds.export.safetensors_files import HEADS_FILE
from ctxlm_ds.models.program import plain_program
from ctxlm_ds.parallel.parameters import initial_value
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.checkpoints import make_config, outputs_of, random_weights, write_random_run, write_run


class Source:
    """A run with known weights."""

    def __init__(self, folder: Path, kind: str, tokenizer: Path) -> None:
        self.vocab_size = load_tokenizer(tokenizer).vocab_size
        self.tokenizer = tokenizer
        self.kind = kind
        self.config = make_config(kind, tokenizer, self.vocab_size)
        self.weights = random_weights(self.config)
        self.run = write_run(folder / "run", self.config, self.weights)

    def config_with(self, **settings: object) -> RunConfig:
        return make_config(self.kind, self.tokenizer, self.vocab_size, dict(settings))


@pytest.fixture
def bert(tmp_path: Path, wordpiece_folder: Path) -> Source:
    return Source(tmp_path, "bert_nsp", wordpiece_folder)


def fresh_values(config: RunConfig, outputs: tuple[str, ...] | None = None) -> dict[str, torch.Tensor]:
    whole = plain_program(config.model, outputs_of(config) if outputs is None else outputs)
    return {name: initial_value(name, shape, whole.facts[name].init, 5) for name, shape in whole.shapes.items()}


def load(path: Path, config: RunConfig, outputs: tuple[str, ...] | None = None) -> dict[str, torch.Tensor]:
    outputs = outputs_of(config) if outputs is None else outputs
    fresh = fresh_values(config, outputs)
    loaded = dict(load_initial_weights(path, config.model, outputs, fresh.__getitem__))
    assert {name: value.shape for name, value in loaded.items()} == {name: value.shape for name, value in fresh.items()}
    assert {value.dtype for value in loaded.values()} == {torch.float32}
    return loaded


def test_every_kind_of_source_gives_the_same_weights(bert: Source, tmp_path: Path) -> None:
    to_hf(bert.run, tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "imported")
    for path in (bert.run, bert.run / "checkpoints" / "step-00000100", tmp_path / "hf", tmp_path / "imported"):
        loaded = load(path, bert.config)
        assert all(loaded[name].equal(value) for name, value in bert.weights.items()), path


def test_a_larger_vocabulary_keeps_its_fresh_rows(bert: Source) -> None:
    config = bert.config_with(vocab_size=bert.vocab_size + 7)
    loaded, fresh = load(bert.run, config), fresh_values(config)
    for name, rows in (("word_embeddings.weight", bert.vocab_size), ("mlm_bias.bias", bert.vocab_size)):
        assert loaded[name][:rows].equal(bert.weights[name]) and loaded[name][rows:].equal(fresh[name][rows:])
        assert len(loaded[name]) > rows


@pytest.mark.parametrize(("family", "unused"), [("bert", 0), ("roberta", 2)])
def test_a_longer_position_table_repeats_its_positions(
    family: str, unused: int, tmp_path: Path, byte_bpe_folder: Path, wordpiece_folder: Path
) -> None:
    """As Longformer's: without RoBERTa's two unused rows, and cut at the end."""
    source = Source(tmp_path, family, byte_bpe_folder if family == "roberta" else wordpiece_folder)
    name = "embeddings.position_embeddings.weight"
    before, after = source.weights[name], load(source.run, source.config_with(max_position_embeddings=100))[name]
    positions = before[unused:]
    assert len(positions) == 40 and torch.equal(after, torch.cat((before, positions, positions[:20])))


def test_heads_follow_the_new_objective(bert: Source, tmp_path: Path, wordpiece_folder: Path) -> None:
    without = load(bert.run, bert.config, ("predicted_logits",))
    assert not any(name.startswith(("heads.pooler", "heads.nsp")) for name in without)
    plain = Source(tmp_path / "plain", "bert", wordpiece_folder)
    with_heads = load(plain.run, bert.config)
    name = "heads.pooler.weight"
    assert with_heads[name].equal(fresh_values(bert.config)[name])
    assert with_heads["mlm_bias.bias"].equal(plain.weights["mlm_bias.bias"])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_layers": 3}, ["encoder.2.mlp.up.weight is missing", "encoder.2.attention.qkv.bias is missing"]),
        ({"num_layers": 1}, ["encoder.1.mlp.up.weight is unknown", "encoder.1.attention.qkv.bias is unknown"]),
        ({"intermediate_size": 64}, ["encoder.0.mlp.up.weight has shape (48, 32)", "encoder.1.mlp.down.weight"]),
        ({"vocab_size": 9}, ["word_embeddings.weight has shape", "mlm_bias.bias has shape"]),
        ({"num_attention_heads": 8}, ["model.num_attention_heads is 4 there, 8 here"]),
        ({"layer_norm_eps": 1e-5, "hidden_activation": "relu"}, ["model.layer_norm_eps", "model.hidden_activation"]),
        ({"type_vocab_size": 3}, ["embeddings.token_type_embeddings.weight has shape (2, 32) there, (3, 32) here"]),
    ],
)
def test_every_difference_is_named_before_any_value(bert: Source, settings: dict, named: list[str]) -> None:
    config = bert.config_with(**settings)
    with pytest.raises(CheckpointError) as error:
        load_initial_weights(bert.run, config.model, outputs_of(config), lambda name: torch.zeros(1))
    assert all(text in str(error.value) for text in named)


def test_no_such_folder(tmp_path: Path, bert: Source) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        load(tmp_path / "none", bert.config)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        load(tmp_path / "empty", bert.config)


def test_an_export_keeps_the_boundary_head_for_the_next_run(tmp_path: Path, wordpiece_folder: Path) -> None:
    """transformers has no class with SpanBERT's head: it reads the rest, and an import leaves the head out."""
    source = Source(tmp_path, "spanbert", wordpiece_folder)
    assert to_hf(source.run, tmp_path / "hf").hf_class == "BertForMaskedLM"
    loaded = load(tmp_path / "hf", source.config)
    assert any(name.startswith("boundary_") for name in loaded)
    assert all(loaded[name].equal(value) for name, value in source.weights.items())
    theirs, info = transformers.BertForMaskedLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    weights = source.weights["word_embeddings.weight"]
    assert theirs.bert.embeddings.word_embeddings.weight.equal(weights)
    from_hf(tmp_path / "hf", tmp_path / "imported")
    imported, fresh = load(tmp_path / "imported", source.config), fresh_values(source.config)
    assert imported["boundary_head.first.weight"].equal(fresh["boundary_head.first.weight"])
    (tmp_path / "hf" / HEADS_FILE).write_bytes(b"short")
    with pytest.raises(ExportError, match="extra_heads.safetensors is damaged"):
        load(tmp_path / "hf", source.config)


def test_moments_of_rows_and_heads_that_the_source_lacks_are_0(tmp_path: Path, wordpiece_folder: Path) -> None:
    """write_run stores the weights as moments, too."""
    plain = Source(tmp_path, "bert", wordpiece_folder)
    config = make_config("bert_nsp", wordpiece_folder, plain.vocab_size + 7, {"max_position_embeddings": 64})
    whole = plain_program(config.model, outputs_of(config))
    moments = load_initial_moments(plain.run, "adamw", whole)
    assert list(moments) == ["exp_avg"]
    found = dict(moments["exp_avg"])
    assert {name: tuple(value.shape) for name, value in found.items()} == whole.trained_shapes
    grown = {"word_embeddings.weight", "mlm_bias.bias", "embeddings.position_embeddings.weight"}
    for name, value in found.items():
        there = plain.weights.get(name, value[:0])
        assert value[: len(there)].equal(there) and not value[len(there) :].any()
        assert (len(value) > len(there)) == (name in grown or name.startswith(("heads.pooler", "heads.nsp"))), name


def test_moments_that_are_missing_or_damaged_are_refused(bert: Source, tmp_path: Path) -> None:
    whole = plain_program(bert.config.model, outputs_of(bert.config))
    to_hf(bert.run, tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "imported")
    for folder in (tmp_path / "hf", tmp_path / "imported"):
        with pytest.raises(CheckpointError, match="hf has no|imported has no optimizer's moments"):
            load_initial_moments(folder, "adamw", whole)
    file = next((bert.run / "checkpoints" / "step-00000100").glob("moments-*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    load(bert.run, bert.config)
    with pytest.raises(CheckpointError, match="moments-.* sha256"):
        load_initial_moments(bert.run, "adamw", whole)


def test_a_tokenizer_with_other_tokens_is_reported(
    bert: Source, tmp_path: Path, byte_bpe_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    to_hf(bert.run, tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "imported")
    for path in (bert.run / "checkpoints" / "step-00000100", tmp_path / "hf", tmp_path / "imported"):
        warn_of_other_tokens(path, load_tokenizer(bert.tokenizer))
        assert "other tokens" not in caplog.text
        warn_of_other_tokens(path, load_tokenizer(byte_bpe_folder))
        assert f"the tokenizer of {path} has other tokens at " in caplog.text
        assert "(0: '[PAD]' there, '<s>' here)" in caplog.text
        caplog.clear()


def test_equal_steps_over_the_layers_are_those_of_distilbert() -> None:
    assert spread(12, 6) == [0, 2, 4, 7, 9, 11]
    assert (spread(24, 12)[0], spread(24, 12)[-1], spread(4, 4), spread(5, 1)) == (0, 23, [0, 1, 2, 3], [0])


@pytest.mark.parametrize(("layers", "wanted"), [("spread", [0, 3, 5]), ([5, 0, 1], [5, 0, 1])])
def test_a_student_starts_from_layers_of_its_teacher(
    tmp_path: Path, wordpiece_folder: Path, layers: list[int] | str, wanted: list[int]
) -> None:
    size = load_tokenizer(wordpiece_folder).vocab_size
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=size, hidden_size=32, num_hidden_layers=6, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=40,
    )  # fmt: skip
    teacher = transformers.BertForPreTraining(config)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn_like(parameter))
    teacher.save_pretrained(tmp_path / "teacher")
    student = make_config("distilbert", wordpiece_folder, size, {"num_layers": 3, "layer_norm_eps": 1e-12})
    outputs, fresh = outputs_of(student), fresh_values(student)
    loaded = dict(load_initial_weights(tmp_path / "teacher", student.model, outputs, fresh.__getitem__, layers))
    theirs = teacher.state_dict()
    for here, there in enumerate(wanted):
        value = theirs[f"bert.encoder.layer.{there}.output.dense.weight"]
        assert loaded[f"encoder.{here}.mlp.down.weight"].equal(value)
    assert loaded["embeddings.layer_norm.bias"].equal(theirs["bert.embeddings.LayerNorm.bias"])
    assert loaded["heads.mlm_transform.weight"].equal(theirs["cls.predictions.transform.dense.weight"])
    assert loaded["mlm_bias.bias"].equal(theirs["cls.predictions.bias"]) and loaded.keys() == fresh.keys()


@pytest.mark.parametrize(
    ("layers", "message"),
    [([0, 1, 2], "has 3 layers, but the model has 2"), ([0, 2], "2 is not one of the source's layers 0 to 1")],
)
def test_numbers_of_layers_that_do_not_fit_are_refused(
    tmp_path: Path, wordpiece_folder: Path, layers: list[int], message: str
) -> None:
    config = make_config("bert_nsp", wordpiece_folder)
    run = write_random_run(tmp_path / "run", "bert_nsp", wordpiece_folder)
    with pytest.raises(CheckpointError, match=message):
        load_initial_weights(run, config.model, outputs_of(config), lambda name: torch.empty(0), layers)
