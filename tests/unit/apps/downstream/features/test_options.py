"""Options of frozen vectors: which go together, what is recorded, the kind that they give.

Choices of layers: their forms, what they compute, what is refused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.apps.downstream.features.kinds import kind_of_features
from ctxlm_ds.apps.downstream.features.options import LayerChoice, recorded_options
from ctxlm_ds.apps.downstream.prepare import Parts
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.finetune import parse_arguments
from tests.downstream_models import sentiment, write_bert

REST = ["--task", "cola", "--data", "data"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "m", "--layers", "mix:4"), "--layers: only with --features"),
        (("--model", "m", "--static", "f"), "--static: only with --features"),
        (("--features", "m", "--lora", "4"), "--lora: only with --model"),
        (("--features", "m", "--train-layers", "0"), "--train-layers: only with --model"),
        (("--features", "m", "--max-length", "64"), "--max-length: only with --model"),
        (("--features", "m", "--random"), "--random: only with --model"),
        (("--features", "m", "--deepspeed", "zero2"), "--deepspeed: only with --model"),
    ],
)
def test_options_of_the_other_way_are_refused(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arguments([*REST, "--output", "out", *options])


def test_a_source_is_needed_and_only_one(capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in ((["--model", "m", "--features", "f"], "not allowed with"), ([], "is required")):
        with pytest.raises(SystemExit):
            parse_arguments([*REST, "--output", "out", *options])
        assert message in capsys.readouterr().err


def test_the_kind_reads_what_the_options_name(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "bert")
    (tmp_path / "glove.txt").write_text("the 1 2\nGood 3 4\nother 5 6\n")
    task, examples = sentiment(4)
    parts = Parts(examples, examples, None, ["bad", "good"])
    options = [*REST, "--output", str(tmp_path / "out"), "--features", str(folder), "--layers"]
    arguments = parse_arguments([*options, "mix:2", "--static", str(tmp_path / "glove.txt"), "--mix-at", "both"])
    recorded = recorded_options(arguments)["features"]
    assert (recorded["static"], recorded["pooling"]) == (str(tmp_path / "glove.txt"), "first")
    kind = kind_of_features(arguments, task, parts)
    row = kind.features(examples)[0]
    assert row["vectors"][0].shape == (5, 2, 32) and row["static"][0][0].tolist() == [1, 2]
    with pytest.raises(ConfigError, match="--layers all: a task's model reads one vector"):
        kind_of_features(parse_arguments([*options, "all"]), task, parts)
    with pytest.raises(ConfigError, match="--static .*bert: no such file; give a file of static vectors"):
        kind_of_features(parse_arguments([*options, "0", "--static", str(folder)]), task, parts)
    assert recorded_options(parse_arguments([*REST, "--output", "o", "--model", "m"])) == {}


LAYERS = np.random.default_rng(1).normal(size=(5, 3, 4)).astype(np.float32)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", LAYERS[:1]),
        ("-2", LAYERS[3:4]),
        ("all", LAYERS),
        ("sum:2", (LAYERS[3] + LAYERS[4])[None]),
        ("mean:4", ((LAYERS[1] + LAYERS[2] + LAYERS[3] + LAYERS[4]) / 4)[None]),
        ("mean:all", LAYERS.mean(axis=0)[None]),
        ("concat:2", np.concatenate([LAYERS[3], LAYERS[4]], axis=1)[None]),
        ("mix:3", LAYERS[2:]),
        ("mix:all", LAYERS),
    ],
)
def test_a_choice_is_read_and_selected(text: str, expected: np.ndarray) -> None:
    choice = LayerChoice.parse(text)
    assert str(choice) == text
    choice.check(5, "model")
    found = choice.select(LAYERS)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert choice.shape(5, 4) == (found.shape[0], found.shape[2])


@pytest.mark.parametrize("text", ["", "last", "sum", "sum:0", "mean:x", "max:2", "1.5"])
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a layer"):
        LayerChoice.parse(text)


@pytest.mark.parametrize("text", ["5", "-6", "concat:6"])
def test_a_layer_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"--layers {text}: model has 5 layers, 0 \(embeddings\) to 4"):
        LayerChoice.parse(text).check(5, "model")
