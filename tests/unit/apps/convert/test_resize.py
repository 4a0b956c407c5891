"""ctxlm convert tokenizer: each row of the new vocabulary comes from the old rows that the old tokenizer says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from ctxlm_ds.apps.convert.resize import change_tokenizer, sparsemax
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.errors import CheckpointError, ConfigError, ExportError
from ctxlm_ds.export.huggingface import to_hf
from ctxlm_ds.export.initial_weights import load_initial_weights
from ctxlm_ds.export.weights import open_checkpoint
from ctxlm_ds.recipe.schema import RunConfig, TeacherConfig
from ctxlm_ds.registry import FAMILIES
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.checkpoints import WORDS, make_config, make_tokenizer, random_weights, write_random_run, write_run
from tests.sections import objective_section

WORD = "hillside"
"""Of the new text alone, so that the old tokenizer has pieces of it."""
SPECIAL = {
    "wordpiece": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "bpe": ("<pad>", "<unk>", "<s>", "</s>", "<mask>"),
}


def retrained(kind: str, folder: Path) -> Path:
    texts = [f"{WORD} {word} {WORD} river" for word in WORDS] * 30
    train_tokenizer(kind, iter(texts), 290, folder)
    return folder


@pytest.mark.parametrize(("family", "kind"), [("bert_nsp", "wordpiece"), ("roberta", "bpe")])
def test_rows_are_those_of_the_old_pieces(family: str, kind: str, tmp_path: Path) -> None:
    old = make_tokenizer("byte_bpe" if kind == "bpe" else kind, tmp_path / "old")
    run = write_random_run(tmp_path / "run", family, old)
    lines = change_tokenizer(run, retrained(kind, tmp_path / "new"), tmp_path / "out")
    source, found = open_checkpoint(run), CheckpointReader(tmp_path / "out")
    table = source.program.vocabulary_table
    before, after = source.reader.read_full(table), found.read_full(table)
    theirs, ours = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("old", "new"))
    assert after.shape[0] == len(ours.get_vocab()) == load_tokenizer(tmp_path / "new").vocab_size

    def ids(tokenizer: object, text: str) -> list[int]:
        return tokenizer(f"a {text}", add_special_tokens=False)["input_ids"][1:]

    (whole,), pieces = ids(ours, WORD), ids(theirs, WORD)
    assert len(pieces) > 1
    torch.testing.assert_close(after[whole], before[pieces].mean(dim=0))
    (river,) = ids(ours, "river")
    torch.testing.assert_close(after[river], before[ids(theirs, "river")].mean(dim=0))
    for name in SPECIAL[kind]:
        numbers = [each.convert_tokens_to_ids(name) for each in (theirs, ours)]
        assert torch.equal(before[numbers[0]], after[numbers[1]]), name
    assert any(line.startswith("equal: ") for line in lines) and any(line.startswith("pieces: ") for line in lines)


def test_the_same_tokenizer_changes_nothing(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("gpt2", tmp_path / "tok")
    run = write_random_run(tmp_path / "run", "gpt2", tokenizer)
    lines = change_tokenizer(run, tokenizer, tmp_path / "out")
    before, after = open_checkpoint(run).reader, CheckpointReader(tmp_path / "out")
    assert all(torch.equal(before.read_full(name), after.read_full(name)) for name in before.names())
    assert not any(line.startswith(("pieces", "initial")) for line in lines)


@pytest.mark.parametrize("family", ["bert", "albert", "electra", "modernbert"])
def test_every_table_and_bias_follows_and_the_model_exports(family: str, tmp_path: Path) -> None:
    run = write_random_run(tmp_path / "run", family, make_tokenizer("wordpiece", tmp_path / "old"))
    new = retrained("wordpiece", tmp_path / "new")
    change_tokenizer(run, new, tmp_path / "out", "random")
    changed = open_checkpoint(tmp_path / "out")
    facts = changed.program.facts
    grown = [name for name in changed.reader.names() if facts[name].grows == "vocabulary"]
    size = load_tokenizer(new).vocab_size
    assert len(grown) > 1 and {changed.reader.shape(name)[0] for name in grown} == {size}
    assert max(each.relative for each in to_hf(tmp_path / "out", tmp_path / "hf").comparisons) < 1e-5
    loaded = dict(load_initial_weights(tmp_path / "out", changed.model, changed.outputs, dict[str, torch.Tensor]().pop))
    assert all(torch.equal(loaded[name], changed.reader.read_full(name)) for name in changed.reader.names())


def test_a_student_has_no_teacher_of_the_old_vocabulary(tmp_path: Path) -> None:
    config = make_config("distilbert", make_tokenizer("wordpiece", tmp_path / "old"))
    teacher = TeacherConfig(path="teacher", model=config.model.model_copy(update={"family": "bert"}))
    config = config.model_copy(update={"objective": objective_section(name="distillation"), "teacher": teacher})
    run = write_run(tmp_path / "run", config, random_weights(config))
    change_tokenizer(run, retrained("wordpiece", tmp_path / "new"), tmp_path / "out", "random")
    assert open_checkpoint(tmp_path / "out").model.vocab_size == load_tokenizer(tmp_path / "new").vocab_size


def test_sparsemax_is_the_nearest_point_of_the_simplex() -> None:
    """Two scores whose difference d is below 1 get (1 + d) / 2 and (1 - d) / 2, and a far third one 0."""
    found = sparsemax(torch.tensor([0.1, 0.9, 0.5, -0.7]).double())
    torch.testing.assert_close(found, torch.tensor([0.0, 0.7, 0.3, 0.0]).double())
    assert sparsemax(torch.tensor([5.0, 1.0])).tolist() == [1.0, 0.0]
    torch.testing.assert_close(sparsemax(torch.full((4,), 0.2)), torch.full((4,), 0.25))


def test_static_rows_are_weighted_means_of_near_tokens(tmp_path: Path) -> None:
    """The vector of the new token is 0.8 and 0.6 along those of two known ones: weights 0.6 and 0.4."""
    run = write_random_run(tmp_path / "run", "bert", make_tokenizer("wordpiece", tmp_path / "old"))
    new = retrained("wordpiece", tmp_path / "new")
    vectors = tmp_path / "vectors.txt"
    vectors.write_text(f"4 3\nriver 2 0 0\nbooks 0 3 0\nwalked 0 0 1\n{WORD} 0.8 0.6 0\n")
    lines = change_tokenizer(run, new, tmp_path / "out", "static", vectors=vectors)
    before, after = open_checkpoint(run).reader, CheckpointReader(tmp_path / "out")
    old, ours = (load_tokenizer(tmp_path / name) for name in ("old", "new"))
    for name in ("word_embeddings.weight", "mlm_bias.bias"):
        rows, found = before.read_full(name), after.read_full(name)
        river, books = (rows[old.token_to_id(word)] for word in ("river", "books"))
        torch.testing.assert_close(found[ours.token_to_id(WORD)], 0.6 * river + 0.4 * books)
        assert torch.equal(found[ours.token_to_id("river")], river)
    assert any(line.startswith("static: 1 ") for line in lines) and any(line.startswith("pieces: ") for line in lines)


def test_vectors_are_trained_on_a_corpus(tmp_path: Path) -> None:
    run = write_random_run(tmp_path / "run", "bert", make_tokenizer("wordpiece", tmp_path / "old"))
    corpus, new = tmp_path / "corpus.txt", retrained("wordpiece", tmp_path / "new")
    corpus.write_text("".join(f"{WORD} {word} river\n" for word in WORDS) * 12)
    for name in ("out", "again"):
        lines = change_tokenizer(run, new, tmp_path / name, "static", corpus=corpus)
        assert any(line.startswith("static: 1 ") for line in lines), lines  # tokens seen 10 times
    first, second = (CheckpointReader(tmp_path / name).read_full("word_embeddings.weight") for name in ("out", "again"))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("static", (None, None), "static needs either --vectors or --corpus"),
        ("pieces", ("v", None), "static needs either --vectors or --corpus, the others neither"),
        ("static", ("v", None), "no token that both tokenizers have has a vector"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(
    method: str, given: tuple[str | None, None], message: str, tmp_path: Path
) -> None:
    run = write_random_run(tmp_path / "run", "bert", make_tokenizer("wordpiece", tmp_path / "old"))
    (tmp_path / "v").write_text("unseen 1 0\nother 0 1\n")
    vectors = tmp_path / "v" if given[0] else None
    with pytest.raises(ConfigError, match=message):
        change_tokenizer(run, retrained("wordpiece", tmp_path / "new"), tmp_path / "out", method, vectors)
    assert not (tmp_path / "out").exists()


def test_a_model_that_reads_characters_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("wordpiece", tmp_path / "tok")
    sections = FAMILIES.get("elmo").tiny()
    sections["model"]["vocab_size"] = load_tokenizer(tokenizer).vocab_size
    config = RunConfig.model_validate({**sections, "tokenizer": {"path": str(tokenizer)}})
    run = write_run(tmp_path / "run", config, random_weights(config))
    with pytest.raises(ExportError, match=r"model.family elmo reads characters, so no tokenizer has its rows"):
        change_tokenizer(run, tokenizer, tmp_path / "out")


def test_what_cannot_be_changed_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("gpt2", tmp_path / "tok")
    run = write_random_run(tmp_path / "run", "gpt2", tokenizer)
    with pytest.raises(CheckpointError, match="exists and would be overwritten"):
        change_tokenizer(run, tokenizer, tmp_path / "tok")
    with pytest.raises(CheckpointError, match="no such folder"):
        change_tokenizer(tmp_path / "gone", tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()
