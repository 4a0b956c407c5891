"""tools/embed.py: what it writes is transformers' hidden states, or ELMo's layers; mistakes are one message.

Both forms of files are read back; nothing incomplete stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import load_file

from ctxlm_ds.apps.downstream.embed import build_parser, main, write_vectors
from tests.downstream_models import hidden_states, write_bert
from tests.integration.route import call_here

LINES = ["the film was good .", "Ann met unknown films in Paris"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embed")
    write_bert(folder / "bert")
    (folder / "text.txt").write_text("\n".join(LINES) + "\n")
    return folder


def run(files: Path, *options: object, status: int = 0) -> str:
    """Run the command; return what it says on standard error."""
    base = ["--features", files / "bert", "--input", files / "text.txt", "--lines"]
    done = call_here(main, "embed.py", *base, *options)
    assert done.returncode == status, done.stderr
    return done.stderr


def test_words_are_hidden_states(files: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    run(files, "--layers", "concat:2", "--output", tmp_path / "v.safetensors")
    with safe_open(tmp_path / "v.safetensors", "np") as file:
        assert file.metadata()["layers"] == "concat:2"
        found = {name: file.get_tensor(name) for name in ("vectors", "offsets")}
    assert found["offsets"].tolist() == [0, 5, 11] and found["vectors"].shape == (11, 1, 64)
    for number, line in enumerate(LINES):
        states, word_ids = hidden_states(files / "bert", line.split())
        firsts = [word_ids.index(word) for word in range(len(line.split()))]
        expected = np.concatenate([states[-2, firsts], states[-1, firsts]], axis=1)
        rows = slice(*found["offsets"][number : number + 2])
        np.testing.assert_allclose(found["vectors"][rows, 0], expected, atol=1e-6)


def test_both_files_hold_every_layer(files: Path, tmp_path: Path) -> None:
    for suffix in ("safetensors", "arrow"):
        run(files, "--layers", "all", "--output", tmp_path / f"v.{suffix}")
    columns = pa.ipc.open_file(str(tmp_path / "v.arrow")).read_all()
    layers = [np.array(columns[f"layer_{at}"].to_pylist(), dtype=np.float32) for at in range(4)]
    np.testing.assert_array_equal(load_file(tmp_path / "v.safetensors")["vectors"], np.stack(layers, axis=1))
    states, word_ids = hidden_states(files / "bert", LINES[1].split())
    np.testing.assert_allclose(layers[1][5:], states[1, [word_ids.index(word) for word in range(6)]], atol=1e-6)


def test_sentences_are_the_mean_of_their_words(files: Path, tmp_path: Path) -> None:
    for unit in ("words", "sentences"):
        run(files, "--layers", "all", "--unit", unit, "--output", tmp_path / f"{unit}.arrow")
    words, sentences = (pa.ipc.open_file(str(tmp_path / f"{unit}.arrow")).read_all() for unit in ("words", "sentences"))
    assert words.schema.metadata[b"layers"] == b"all" and words["sentence"].to_pylist() == [0] * 5 + [1] * 6
    assert sentences["word"].to_pylist() == LINES and words["word"].to_pylist() == " ".join(LINES).split()
    assert sentences.column_names == ["sentence", "word", *(f"layer_{at}" for at in range(4))]
    of_words = np.array(words["layer_2"].to_pylist())
    expected = [of_words[:5].mean(axis=0), of_words[5:].mean(axis=0)]
    np.testing.assert_allclose(np.array(sentences["layer_2"].to_pylist()), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layers", "mix:2"), "a mix is trained with a task"),
        (("--output", "v.npz"), "the name ends in .safetensors or .arrow"),
    ],
)
def test_mistakes_are_refused(files: Path, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    assert message in run(files, "--output", tmp_path / "v.arrow", *options, status=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("option", "warned"), [("--lines", True), ("--split-special-tokens", False)])
def test_names_of_special_tokens_in_a_text_are_told_as_for_a_task(
    option: str, warned: bool, files: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("the film\nAnn met [MASK] in [SEP]\n")
    output = ["--input", tmp_path / "text.txt", "--words", "whitespace", "--output", tmp_path / "v.safetensors"]
    told = "Ann met [MASK] in [SEP]: the text has [MASK], which is read as that special token (2 such names here)"
    assert (told in run(files, *output, option)) == warned


def test_words_without_a_static_vector_are_counted(files: Path, tmp_path: Path) -> None:
    (tmp_path / "glove.txt").write_text("the 1 2\nfilm 2 3\nann 1 1\n")
    told = run(files, "--features", tmp_path / "glove.txt", "--output", tmp_path / "v.safetensors")
    assert f"72.7 % of 11 words have no vector in {tmp_path / 'glove.txt'}; theirs is zero" in told


def test_help_describes_the_files(tmp_path: Path) -> None:
    shown = build_parser().format_help()
    vectors = np.zeros((2, 1, 3), dtype=np.float32)
    write_vectors(tmp_path / "a.safetensors", iter([(["a", "b"], vectors)]), {})
    write_vectors(tmp_path / "a.arrow", iter([(["a", "b"], vectors)]), {"unit": "words"})
    columns = pa.ipc.open_file(str(tmp_path / "a.arrow")).schema.names
    for name in (*load_file(tmp_path / "a.safetensors"), *columns):
        assert f"`{name}`" in shown


def test_nothing_incomplete_stays(tmp_path: Path) -> None:
    def units() -> Iterator[Any]:
        yield ["a", "b"], np.ones((2, 1, 3), dtype=np.float32)
        raise KeyError

    with pytest.raises(KeyError):
        write_vectors(tmp_path / "v.arrow", units(), {})
    assert not list(tmp_path.iterdir())
