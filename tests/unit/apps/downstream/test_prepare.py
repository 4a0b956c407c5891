"""From files and a model folder to features: parts, labels, tokenizers, the longest input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ctxlm_ds.apps.downstream.prepare import Parts, load_tokenizer, longest_input, make_kind, make_sets, read_parts
from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.errors import ConfigError, DataError
from tests.downstream_models import sentiment, write_bert, write_gpt2, write_rows, write_t5


def test_parts_are_read_and_split(tmp_path: Path) -> None:
    task, examples = sentiment(20)
    write_rows(tmp_path / "train.tsv", examples)
    write_rows(tmp_path / "dev.tsv", examples[:4])
    parts = read_parts(task, tmp_path, limit=5)
    assert (len(parts.train), len(parts.dev), parts.test) == (5, 4, None)
    assert parts.labels == ["bad", "good"]
    split = task.model_copy(update={"validation_share": 0.25, "dev": None})
    parts = read_parts(split, tmp_path)
    assert (len(parts.train), len(parts.dev)) == (15, 5)
    assert read_parts(split, tmp_path).dev == parts.dev
    assert sorted(one.identifier for one in parts.train + parts.dev) == sorted(str(at) for at in range(2, 22))


def test_every_part_is_checked_before_training(tmp_path: Path) -> None:
    task, examples = sentiment(8)
    write_rows(tmp_path / "train.tsv", examples)
    (tmp_path / "dev.tsv").write_text("text\tlabel\nthe film\tugly\n")
    parts = read_parts(task, tmp_path)
    kind = make_kind(task, write_bert(tmp_path / "model"), parts)
    with pytest.raises(DataError, match=r"dev\.tsv:2: unknown label"):
        make_sets(kind, parts)


def test_inputs_are_no_longer_than_the_model(tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = write_bert(tmp_path / "bert", max_position_embeddings=24)
    assert longest_input(folder, load_tokenizer(folder, False), 128) == 24
    config = AutoConfig.for_model("roberta", max_position_embeddings=24, hidden_size=8, num_attention_heads=1)
    config.save_pretrained(folder)
    assert longest_input(folder, load_tokenizer(folder, False), 128) == 22
    assert longest_input(folder, load_tokenizer(folder, False), 9) == 9


def test_byte_level_tokenizers_read_words_and_pad(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2TokenizerFast

    words = {"<|endoftext|>": 0, "Ġ": 1, "a": 2, "b": 3, "Ġa": 4}
    backend = Tokenizer(models.BPE(vocab=words, merges=[("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    GPT2TokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(tmp_path)
    GPT2Config().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, True)
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer(["a", "a"], is_split_into_words=True)["input_ids"] == [4, 4]


def test_names_of_special_tokens_in_texts_are_found_before_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task, examples = sentiment(4)
    examples[2] = replace(examples[2], text="good </s> film")
    parts = Parts(examples, examples[:1], None, ["bad", "good"])
    with pytest.raises(DataError, match=r"^train\.tsv:2: the text has </s>.*--split-special-tokens"):
        make_sets(make_kind(task, write_t5(tmp_path / "t5"), parts), parts)
    make_sets(make_kind(task, write_gpt2(tmp_path / "gpt2"), parts), parts)
    assert "train.tsv:2: the text has </s>" in caplog.text
    caplog.clear()
    kind = make_kind(task.model_copy(update={"split_special_tokens": True}), tmp_path / "t5", parts)
    row = make_sets(kind, parts)["train"][2]["input_ids"]
    assert row.count(kind.tokenizer.eos_token_id) == 1 and row[-1] == kind.tokenizer.eos_token_id
    assert kind.tokenizer.unk_token_id in row and not caplog.records


def test_a_model_that_sums_up_the_last_position_is_padded_in_front(tmp_path: Path) -> None:
    from transformers import XLNetConfig

    task, examples = sentiment(4)
    parts = Parts(examples, examples, None, ["bad", "good"])
    folder = write_bert(tmp_path)
    assert make_kind(task, folder, parts).tokenizer.padding_side == "right"
    XLNetConfig(vocab_size=30, d_model=16, n_layer=1, n_head=2, d_inner=16).save_pretrained(folder)
    kind = make_kind(task, folder, parts)
    assert kind.tokenizer.padding_side == "left" and kind.max_length == 32
    assert "token_type_ids" in kind.features(examples)[0]


def test_a_kind_without_a_class_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config

    columns = {"text": "q", "choices": "c", "label": "y"}
    task = TaskDescription(kind="multiple_choice", format="jsonl", train="t", dev="d", columns=columns)
    folder = write_bert(tmp_path)
    GPT2Config(n_positions=32).save_pretrained(folder)
    with pytest.raises(ConfigError, match="no model of type gpt2 for tasks of kind multiple_choice"):
        make_kind(task, folder, Parts([], [], None, []))
