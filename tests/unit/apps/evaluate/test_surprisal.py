"""Surprisals of words: sums over tokens, a plain loop of transformers, and words whose first token is not scored."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForMaskedLM

from ctxlm_ds.apps.evaluate.command import main
from ctxlm_ds.apps.evaluate.scorers import TokenScores
from ctxlm_ds.apps.evaluate.surprisal import word_surprisals
from ctxlm_ds.errors import DataError
from tests.downstream_models import write_bert, write_gpt2
from tests.unit.apps.evaluate.test_scorers import loaded, masked_values


def test_a_word_is_the_sum_of_its_tokens_wherever_their_white_space_is() -> None:
    scored = TokenScores(np.array([-1.0, -2.0, -4.0, -8.0, -16.0]), [(0, 2), (2, 4), (4, 5), (5, 7), (7, 10)])
    assert list(word_surprisals("good  old day", scored)) == [("good", 3.0), ("old", 12.0), ("day", 16.0)]
    late = TokenScores(np.array([-2.0, -4.0]), [(2, 4), (4, 8)])
    (first, second) = word_surprisals("good day", late)
    assert math.isnan(first[1]) and second == ("day", 4.0)
    ended = TokenScores(np.array([-1.0, -2.0, -4.0]), [(0, 4), (4, 8), (0, 0)])  # the last is a special token
    assert list(word_surprisals("good day", ended)) == [("good", 1.0), ("day", 2.0)]


def test_the_file_equals_a_plain_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_bert(tmp_path / "bert")
    text = "the unknowns met\n\nAnn was good .\n"
    (tmp_path / "text.txt").write_text(text)
    capsys.readouterr()
    main(["surprisal", str(tmp_path / "text.txt"), "--model", str(folder)])
    head, *rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert head == ["line", "word", "nats", "bits"]
    assert [row[:2] for row in rows] == [["1", word] for word in text.split("\n")[0].split()] + [
        ["3", word] for word in text.split("\n")[2].split()
    ]
    tokenizer, model = loaded(folder, AutoModelForMaskedLM)
    line, wanted = text.split("\n")[0], [0.0] * 3
    words = [word for word in tokenizer(line).word_ids() if word is not None]
    assert len(words) > len(wanted)  # a word has several tokens
    for word, value in zip(words, masked_values(tokenizer, model, line), strict=True):
        wanted[word] -= value
    assert [float(row[2]) for row in rows[:3]] == pytest.approx(wanted, abs=1e-5)
    assert [float(row[3]) for row in rows[:3]] == pytest.approx([nats / math.log(2) for nats in wanted], abs=1e-5)


def test_a_first_word_that_nothing_is_before_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("the film was good\n")
    main(["surprisal", str(tmp_path / "text.txt"), "--model", str(write_gpt2(tmp_path / "gpt2"))])
    _, first, *others = capsys.readouterr().out.splitlines()
    assert first == "1\tthe\tnan\tnan" and len(others) == 3 and not any("nan" in line for line in others)
    with pytest.raises(DataError, match=r"none.txt: missing"):
        main(["surprisal", str(tmp_path / "none.txt"), "--model", str(tmp_path / "gpt2")])
