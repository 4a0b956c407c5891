"""Options of Megatron's script get an answer; its names of the tokenizer's files are taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.apps.text.preprocess_data import MEGATRON, WITHOUT_EFFECT, build_parser, main, without_megatron
from ctxlm_ds.errors import ConfigError, TokenizerError

COMMAND = ["--input", "a.jsonl", "--output-prefix", "out", "--workers", "2", "--append-eod", "--json-keys", "text"]


def test_options_that_would_change_the_dataset_are_named_with_their_answer() -> None:
    words = [*COMMAND, "--max_documents=4", "--partitions", "4", "--log-interval", "100", "--dataset-impl", "lazy"]
    with pytest.raises(ConfigError) as caught:
        without_megatron(words)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["--max-documents", "--partitions", "--dataset-impl"]
    assert "--shard I/N" in lines[2]
    with pytest.raises(ConfigError, match="only mmap"):
        without_megatron([*COMMAND, "--dataset-impl=cached"])


def test_options_without_effect_are_left_out_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    foreign = ["--tokenizer-type", "GPT2BPETokenizer", "--dataset_impl=mmap", "--keep-sequential-samples"]
    further = ["--log_interval", "9", "--partitions=1"]
    words = [*foreign, "--json_keys", "a_b", "c", *further, *COMMAND, "--merge_file", "x_y"]
    assert without_megatron(words) == ["--json-keys", "a_b", "c", *COMMAND, "--merge-file", "x_y"]
    names = "--tokenizer-type, --dataset-impl, --keep-sequential-samples, --log-interval, --partitions"
    assert capsys.readouterr().err == f"not needed here, ignored: {names}\n"
    assert without_megatron(COMMAND) == COMMAND and not capsys.readouterr().err


def test_a_merges_file_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/gpt2-vocab.json", "a/gpt2-merges.txt", "b/merges.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    vocabulary, merges = str(tmp_path / "a/gpt2-vocab.json"), str(tmp_path / "b/merges.txt")
    words = [*COMMAND, "--vocab-file", vocabulary, "--merge-file", merges]
    monkeypatch.setattr("sys.argv", ["preprocess", *words])
    with pytest.raises(TokenizerError, match="put both files into one folder"):
        main()


def test_answers_name_options_that_exist_and_are_no_options_themselves() -> None:
    known = {name for action in build_parser()._actions for name in action.option_strings}
    assert not known & {*MEGATRON, *WITHOUT_EFFECT}
    named = {word.strip(",;:()") for answer in MEGATRON.values() for word in answer.split() if word.startswith("--")}
    assert named and named <= known | MEGATRON.keys()


@pytest.mark.parametrize("name", ["--tokenizer", "--vocab-file", "--tokenizer-model"])
def test_the_tokenizers_files_are_taken_under_megatrons_names(name: str) -> None:
    words = [*COMMAND, name, "vocab.txt"]
    assert without_megatron(words) == words
    assert build_parser().parse_args(words).tokenizer == "vocab.txt"
