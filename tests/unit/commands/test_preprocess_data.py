"""Options of Megatron's script get an answer; its names of the tokenizer's files are taken."""

from __future__ import annotations

import pytest

from ctxlm_ds.commands.preprocess_data import MEGATRON, build_parser, refuse_megatron
from ctxlm_ds.errors import ConfigError

COMMAND = ["--input", "a.jsonl", "--output-prefix", "out", "--workers", "2", "--append-eod", "--json-keys", "text"]


def test_every_foreign_option_is_named_with_its_answer() -> None:
    words = [*COMMAND, "--tokenizer-type=BertWordPieceLowerCase", "--partitions", "4", "--log-interval", "100"]
    with pytest.raises(ConfigError) as caught:
        refuse_megatron(words)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["--tokenizer-type", "--partitions", "--log-interval"]
    assert "--shard I/N" in lines[2]


def test_answers_name_options_that_exist_and_are_no_options_themselves() -> None:
    known = {name for action in build_parser()._actions for name in action.option_strings}
    assert not known & MEGATRON.keys()
    named = {word.strip(",;:()") for answer in MEGATRON.values() for word in answer.split() if word.startswith("--")}
    assert named and named <= known | MEGATRON.keys()


@pytest.mark.parametrize("name", ["--tokenizer", "--vocab-file", "--tokenizer-model"])
def test_the_tokenizers_files_are_taken_under_megatrons_names(name: str) -> None:
    words = [*COMMAND, name, "vocab.txt"]
    refuse_megatron(words)
    assert build_parser().parse_args(words).tokenizer == "vocab.txt"
