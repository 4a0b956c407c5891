"""ELMo's batches beside a transcription of bilm-tf's, its terms, and what does not fit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.preprocess.config import PreprocessConfig
from ctxlm_ds.data.preprocess.job import preprocess
from ctxlm_ds.data.stream.blend import PlannedRows
from ctxlm_ds.data.stream.collate import split_fields
from ctxlm_ds.data.stream.loader import BatchBuilder, EvalLoader, TrainLoader
from ctxlm_ds.data.stream.preview import preview_rows
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.objectives.bidirectional_lm import BidirectionalLM, BidirectionalLMSection
from ctxlm_ds.recipe.check import check_config, find_problems
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.sample_data import FakeTokenizer, run_config
from tests.unit.tokenizers.kinds.test_characters import BilmUnicodeChars

WINDOW, LANES = 4, 2
RNG = np.random.default_rng(5)
SENTENCES = [" ".join(f"w{word}" for word in RNG.zipf(1.5, size=RNG.integers(1, 9)) % 60) for _ in range(150)]


def config_of(inputs: str = "characters", **objective: Any) -> RunConfig:
    return run_config(
        data={"sample_format": "bidirectional_lanes", "seq_length": WINDOW, "num_workers": 0},
        objective={"name": "bidirectional_lm", "inputs": inputs, **objective},
        training={"global_batch_size": LANES, "micro_batch_size": 1, "seed": 7},
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    """A dataset of sentences, a line each, and a tokenizer of 12 words whose other words are only input."""
    folder = tmp_path_factory.mktemp("elmo")
    (folder / "text.txt").write_text("\n\n".join(SENTENCES) + "\n")
    tokenizer = train_tokenizer("elmo", SENTENCES, 12, folder / "tok", words="whitespace", input_words=10_000)
    prefix = preprocess([str(folder / "text.txt")], folder / "tok", folder / "d", PreprocessConfig())[0].prefix
    return Path(prefix), tokenizer


def bilm_batches(sentences: list[list[str]], vocabulary: list[str], backward: bool) -> list[tuple[Any, ...]]:
    """bilm-tf's Vocabulary.encode, encode_chars and _get_batch for one lane: characters, words and next words."""
    ids = {word: number for number, word in enumerate(vocabulary)}
    ends = ("</S>", "<S>") if backward else ("<S>", "</S>")
    batches: list[tuple[Any, ...]] = []
    words: list[str] = []
    targets: list[int] = []
    for sentence in sentences:
        whole = [ends[0], *(reversed(sentence) if backward else sentence), ends[1]]
        words += whole[:-1]
        targets += [ids.get(word, ids["<UNK>"]) for word in whole[1:]]
    for begin in range(0, len(words) - WINDOW + 1, WINDOW):
        part = words[begin : begin + WINDOW]
        numbers = [ids.get(word, ids["<UNK>"]) for word in part]
        batches.append((BilmUnicodeChars().encode(part).tolist(), numbers, targets[begin : begin + WINDOW]))
    return batches


def rows_of(made: tuple[Path, Tokenizer], config: RunConfig) -> tuple[Any, BidirectionalLM]:
    prefix, tokenizer = made
    objective = build_objective(config.objective, tokenizer)
    assert isinstance(objective, BidirectionalLM)
    return build_rows([prefix], tokenizer, config.row_settings), objective


@pytest.mark.parametrize("inputs", ["characters", "words"])
def test_an_epoch_is_bilms_of_the_same_order_of_sentences(made: tuple[Path, Tokenizer], inputs: str) -> None:
    config = config_of(inputs)
    rows, objective = rows_of(made, config)
    tokenizer = made[1]
    builder = BatchBuilder(rows, objective, config.data, 7, "mask")
    planned = PlannedRows(np.arange(len(rows)), np.full(len(rows), 3))
    arrays = split_fields(builder(planned), builder.fields)
    vocabulary = [tokenizer.id_to_token(number) for number in range(12)]
    assert (arrays["sequence_ids"] == 1).all()
    for direction, backward in (("", False), ("reversed_", True)):
        samples, _ = rows.samples(planned.rows, planned.epochs)
        half = samples.input_ids.reshape(-1, 2, WINDOW + 1)[:, int(backward), :-1].ravel().tolist()
        mark = tokenizer.sep_id if backward else tokenizer.cls_id
        read: list[list[str]] = []
        for token in half:
            if token == mark:
                read.append([])
            else:
                read[-1].append(tokenizer.id_to_token(token))
        sentences = [sentence[::-1] if backward else sentence for sentence in read]
        assert sorted(map(" ".join, sentences[:-1])) != [" ".join(sentence) for sentence in sentences[:-1]]
        assert set(map(" ".join, sentences[:-1])) <= set(SENTENCES)
        expected = bilm_batches(sentences, vocabulary, backward)
        known = len(expected) - 1  # the last sentence may go on
        for row, (characters, words, targets) in enumerate(expected[:known]):
            assert arrays[f"{direction}labels"][row].tolist() == targets
            if inputs == "characters":
                assert arrays[f"{direction}character_ids"][row].reshape(WINDOW, 50).tolist() == characters
            else:
                assert arrays[f"{direction}input_ids"][row].tolist() == words
        assert (arrays[f"{direction}labels"] < 12).all() and (arrays[f"{direction}labels"] == 2).any()


def test_words_behind_the_vocabulary_are_only_input(made: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    tokenizer = made[1]
    assert tokenizer.output_size == 12 < tokenizer.vocab_size == 3 + len({w for s in SENTENCES for w in s.split()})
    tokenizer.save(tmp_path / "copy")
    again = load_tokenizer(tmp_path / "copy")
    assert (again.output_size, again.fingerprint) == (12, tokenizer.fingerprint)
    assert len((tmp_path / "copy" / "vocab.txt").read_text().splitlines()) == 12
    assert tokenizer.encode_batch(["w1 never-seen"])[0][1] == tokenizer.unk_id


def test_empty_rows_have_no_labels(made: tuple[Path, Tokenizer]) -> None:
    config = config_of()
    rows, objective = rows_of(made, config)
    builder = BatchBuilder(rows, objective, config.data, 7, "mask")
    for numbers in ([0, -1, 2], [-1, -1, -1]):
        arrays = split_fields(builder(PlannedRows(np.array(numbers), np.zeros(3, dtype=np.int64))), builder.fields)
        for row, number in enumerate(numbers):
            assert (arrays["labels"][row] == IGNORE_LABEL).all() == (number < 0)
            assert arrays["sequence_ids"][row].any() == arrays["character_ids"][row].any() == (number >= 0)


def test_lanes_go_on_from_step_to_step(made: tuple[Path, Tokenizer]) -> None:
    config = config_of("words")
    rows, objective = rows_of(made, config)
    steps = list(itertools.islice(TrainLoader(rows, objective, config.data, config.training), 5))
    for micro_batch in range(LANES):
        for direction, (begin, end) in (("", (0, 1)), ("reversed_", (1, 0))):
            fields = [step.micro_batches[micro_batch].fields for step in steps]
            words = torch.cat([field[f"{direction}input_ids"] for field in fields], dim=1)[0]
            labels = torch.cat([field[f"{direction}labels"] for field in fields], dim=1)[0]
            assert labels[:-1].tolist() == [end if word == begin else word for word in words[1:].tolist()]
    assert steps[0].counts == {"forward": LANES * WINDOW, "backward": LANES * WINDOW}
    assert steps[0].num_tokens == LANES * WINDOW
    assert (
        sum(
            int((batch.fields["labels"] >= 0).sum())
            for batch in EvalLoader(rows, objective, config.data, config.training, config.evaluation)
        )
        > 0
    )


def test_terms_and_fields() -> None:
    objective = build_objective(BidirectionalLMSection(max_characters=7))
    assert [(term.name, term.weight, term.has_perplexity) for term in objective.terms] == [
        ("forward", 0.5, True), ("backward", 0.5, True),
    ]  # fmt: skip
    columns = {field.name: (field.columns, field.fill) for field in objective.fields(config_of().data)}
    assert columns == {
        "sequence_ids": (4, 0), "sequence_starts": (2, 4), "character_ids": (28, 0), "reversed_character_ids": (28, 0),
        "labels": (4, IGNORE_LABEL), "reversed_labels": (4, IGNORE_LABEL),
    }  # fmt: skip


def test_a_preview_shows_both_directions(made: tuple[Path, Tokenizer]) -> None:
    config = config_of()
    rows, objective = rows_of(made, config)
    (shown,) = preview_rows(rows, objective, made[1], config.data, config.training, 1)
    assert "8 predictions" in shown.plain and "[→" in shown.plain and "[←" in shown.plain


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="of kind wordpiece does not have; make one with .* --type elmo"):
        build_objective(BidirectionalLMSection(), FakeTokenizer()).read_corpus(RowSource([]), 7)  # type: ignore[arg-type]
    config = config_of("words").model_copy(update={"data": run_config().data})
    texts = {problem.path: problem.text for problem in find_problems(config)}
    assert "objective.name" in texts
    small = {problem.path: problem.text for problem in find_problems(config_of(max_characters=2))}
    assert "no room for a character" in small["objective.max_characters"]


def test_a_z_loss_is_refused_without_logits_of_words() -> None:
    with pytest.raises(ConfigError, match="objective.z_loss: 0.1: no loss of objective.name bidirectional_lm takes"):
        check_config(config_of(z_loss=0.1), None)
