"""The objective of T5: fields, sentinels of several vocabularies, refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.stream.loader import TrainLoader
from ctxlm_ds.data.stream.preview import preview_rows
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.load import dump_config, load_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.objective_statistics import MOST_ERRORS, lines, statistics
from tests.sample_data import FakeTokenizer, random_documents, run_config, write_dataset

WORDS = "the cat sat on the mat while a dog ran over the green hill and did not stop until it was night"
PAD = 0


def config_of(seq_length: int = 64, **sections: dict[str, object]) -> RunConfig:
    values: dict[str, dict[str, object]] = {
        "model": {"family": "t5"}, "objective": {"name": "span_corruption"},
        "data": {"sample_format": "chunks", "seq_length": seq_length},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return run_config(**values)


def test_rows_of_512_have_targets_of_114() -> None:
    config = config_of(512)
    fields = {field.name: field.columns for field in build_objective(config.objective).fields(config.data)}
    assert config.objective.sample_length(config.data) == 568
    assert fields["input_ids"] == fields["sequence_ids"] == 512
    assert fields["decoder_input_ids"] == fields["decoder_sequence_ids"] == fields["decoder_labels"] == 114


def test_batches_hold_inputs_and_shifted_targets(tmp_path: Path) -> None:
    tokenizer, config = FakeTokenizer(), config_of()
    prefix = write_dataset(tmp_path / "data", random_documents(30, vocab_size=800), split_sentences=False)
    objective = build_objective(config.objective, tokenizer)
    rows = build_rows([prefix], tokenizer, config.row_settings, objective)
    assert set(rows.indexes[0].records["num_tokens"][:-1]) == {config.objective.sample_length(config.data)}
    step = next(iter(TrainLoader(rows, objective, config.data, config.training)))
    assert step.counts["span_corruption"] == sum(
        int((batch.fields["decoder_labels"] != IGNORE_LABEL).sum()) for batch in step.micro_batches
    )
    for batch in step.micro_batches:
        fields = {name: value.numpy() for name, value in batch.fields.items()}
        for row in range(len(fields["input_ids"])):
            inside = fields["sequence_ids"][row] > 0
            assert fields["input_ids"][row][inside][-1] == tokenizer.sep_id
            assert not fields["input_ids"][row][~inside].any()
            labels, ids = fields["decoder_labels"][row], fields["decoder_input_ids"][row]
            size = int((labels != IGNORE_LABEL).sum())
            assert ids[0] == PAD and ids[1:size].tolist() == labels[: size - 1].tolist()
            assert labels[size - 1] == tokenizer.sep_id and labels[0] == tokenizer.vocab_size - 1
            assert fields["decoder_position_ids"][row][:size].tolist() == list(range(size))
            assert fields["decoder_sequence_starts"][row].tolist() == [0, size]
            assert (fields["decoder_sequence_ids"][row] > 0).sum() == size


def test_restored_tokens_are_the_text_of_the_targets(tmp_path: Path) -> None:
    """Sentinels are left out although this vocabulary has them among its words, and so are ends and padding."""
    tokenizer, config = FakeTokenizer(), config_of()
    prefix = write_dataset(tmp_path / "data", random_documents(30, vocab_size=800), split_sentences=False)
    objective = build_objective(config.objective, tokenizer)
    rows = build_rows([prefix], tokenizer, config.row_settings, objective)
    for batch in next(iter(TrainLoader(rows, objective, config.data, config.training))).micro_batches:
        fields = {name: value.numpy() for name, value in batch.fields.items()}
        labels = fields["decoder_labels"]
        text = (labels > tokenizer.sep_id) & (labels < 800)
        assert np.array_equal(objective.restored(fields), text)  # type: ignore[attr-defined]
        assert 0 < text.sum() < (labels != IGNORE_LABEL).sum()


@pytest.mark.parametrize("name", ["span_corruption", "prefix_lm"])
def test_figures_are_the_published_ones(name: str, tmp_path: Path) -> None:
    check_figures(config_of(128, objective={"name": name}), FakeTokenizer(), tmp_path)


def check_figures(config: RunConfig, tokenizer: FakeTokenizer, folder: Path) -> None:
    """Compare what becomes of long and short texts with the published rule, to four standard errors."""
    documents = random_documents(200, vocab_size=800)
    prefix = write_dataset(folder / "data", documents, split_sentences=False)
    objective = build_objective(config.objective, tokenizer)
    rows = build_rows([prefix], tokenizer, config.row_settings, objective)
    figures = statistics(rows, config, objective, 1500)
    assert len(figures) >= 8
    wrong = [figure for figure in figures if figure.distance > MOST_ERRORS]
    assert not wrong, "\n".join(lines(figures))


def test_a_preview_shows_input_and_target(tmp_path: Path) -> None:
    tokenizer, config = FakeTokenizer(), config_of()
    prefix = write_dataset(tmp_path / "data", random_documents(10, vocab_size=800), split_sentences=False)
    objective = build_objective(config.objective, tokenizer)
    rows = build_rows([prefix], tokenizer, config.row_settings, objective)
    (text,) = preview_rows(rows, objective, tokenizer, config.data, config.training, 1)  # type: ignore[arg-type]
    assert "64 of 64 positions, 14 predictions" in text.plain
    shown, target = text.plain.split("→")
    assert shown.count("w999") == target.count("w999") == 1


@pytest.mark.parametrize(
    ("kind", "size", "settings", "names"),
    [
        ("t5", 160, {}, "<extra_id_{}>"),
        ("unigram", 160, {"extra_ids": 100}, "<extra_id_{}>"),
        ("wordpiece", 60, {"special_tokens": tuple(f"<extra_id_{n}>" for n in range(12))}, "<extra_id_{}>"),
        ("wordpiece", 60, {"special_tokens": tuple(f"[unused{n}]" for n in range(12))}, "[unused{}]"),
    ],
)
def test_any_vocabulary_with_sentinels_is_fit(
    kind: str, size: int, settings: dict[str, object], names: str, tmp_path: Path
) -> None:
    tokenizer = train_tokenizer(kind, [WORDS] * 20, size, tmp_path / "tokenizer", **settings)
    config = config_of(objective={"sentinel_tokens": names})
    objective = build_objective(config.objective, tokenizer)
    objective.fields(config.data)
    tables = objective._tables_for(config.data.seq_length)
    assert [tokenizer.id_to_token(token) for token in tables.sentinels] == [
        names.replace("{}", str(number)) for number in range(len(tables.sentinels))
    ]
    assert tables.end_id == tokenizer.sep_id


def test_sentinels_of_the_original_are_the_last_ids(tmp_path: Path) -> None:
    tokenizer: Tokenizer = train_tokenizer("t5", [WORDS] * 20, 160, tmp_path / "tokenizer")
    last = tokenizer.vocab_size - 1
    assert [tokenizer.token_to_id(f"<extra_id_{number}>") for number in range(100)] == list(range(last, last - 100, -1))
    assert (tokenizer.pad_id, tokenizer.sep_id, tokenizer.unk_id) == (0, 1, 2)


def test_a_vocabulary_without_sentinels_is_refused(tmp_path: Path) -> None:
    tokenizer = train_tokenizer("wordpiece", [WORDS] * 20, 60, tmp_path / "tokenizer")
    config = config_of()
    with pytest.raises(ConfigError, match=r"has no <extra_id_0>, rows need 3 such tokens .*--type t5"):
        build_objective(config.objective, tokenizer).fields(config.data)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"objective": {"noise_density": 0.0}}, "objective.noise_density: 0: expected above 0"),
        ({"objective": {"sentinel_tokens": "<extra_id>"}}, "objective.sentinel_tokens: '<extra_id>' has no single"),
        ({"data": {"seq_length": 4}}, "data.seq_length: 4 leaves no room"),
        ({"data": {"sample_format": "doc_sentences", "packing": True}}, "so texts cannot share rows; set it to false"),
        ({"data": {"sample_format": "doc_sentences", "packing": True}}, "data.packing: true, but objective.name"),
    ],
)
def test_impossible_settings_are_refused(sections: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_config(config_of(**sections), None)
    assert words in str(raised.value)


@pytest.mark.parametrize("density", [0.901, 0.999999, 1.0])
def test_noise_leaves_some_text(density: float, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_config(config_of()).replace("noise_density: 0.15", f"noise_density: {density}"))
    with pytest.raises(ConfigError, match=r"objective\.noise_density") as raised:
        load_config(path)
    assert str(raised.value).count("noise_density") == 1


def test_sequence_parallelism_must_split_both_stacks() -> None:
    config = config_of(
        512, parallel={"tensor_parallel_size": 4, "sequence_parallel": True}, training={"micro_batch_size": 1}
    )
    with pytest.raises(ConfigError, match=r"positions of a row of the decoder 114 .*micro_batch_size to 2"):
        check_config(config, None)


def test_no_row_is_no_error() -> None:
    config = config_of()
    objective = build_objective(config.objective, FakeTokenizer())
    assert len(objective.budgets(np.empty(0, dtype=np.int64), config.data)) == 0
