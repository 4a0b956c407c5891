"""The objective of BART and mBART: fields, languages of sources, refusals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.index.build import build_rows, excerpt
from ctxlm_ds.data.stream.loader import EvalLoader, TrainLoader
from ctxlm_ds.data.stream.run_datasets import build_run_rows
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.objectives.text_infilling import TextInfilling
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.schema import RunConfig
from tests.sample_data import FULL_STOP, Documents, FakeTokenizer, random_documents, run_config, write_dataset

LANGUAGES = {"xx_XX": 900, "yy_XX": 901}


@dataclass
class Words(FakeTokenizer):
    """900 and 901 are languages."""

    special_ids: frozenset[int] = frozenset({*range(5), *LANGUAGES.values()})

    def token_to_id(self, token: str) -> int | None:
        return LANGUAGES.get(token, super().token_to_id(token))


TOKENIZER = Words()


def config_of(**sections: dict[str, object]) -> RunConfig:
    values: dict[str, dict[str, object]] = {
        "model": {"family": "t5"}, "objective": {"name": "text_infilling"},
        "data": {"sample_format": "doc_sentences", "separate_sentences": False, "seq_length": 64},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return run_config(**values)


def documents(number: int, seed: int = 0) -> Documents:
    """Documents of sentences that end with a full stop."""
    found = random_documents(number, vocab_size=800, seed=seed)
    return [[[*sentence[:20], FULL_STOP] for sentence in document] for document in found]


def batches(config: RunConfig, folder: Path) -> list[dict[str, np.ndarray]]:  # type: ignore[type-arg]
    """The fields of the micro-batches of a step."""
    prefix = write_dataset(folder / "data", documents(30))
    objective = build_objective(config.objective, TOKENIZER)  # type: ignore[arg-type]
    rows = build_rows([prefix], TOKENIZER, config.row_settings)  # type: ignore[arg-type]
    step = next(iter(TrainLoader(rows, objective, config.data, config.training)))
    return [{name: value.numpy() for name, value in batch.fields.items()} for batch in step.micro_batches]


@pytest.mark.parametrize("sample_format", ["doc_sentences", "full_sentences", "chunks"])
def test_batches_hold_noised_inputs_and_shifted_texts(sample_format: str, tmp_path: Path) -> None:
    config = run_config(
        model={"family": "t5"}, objective={"name": "text_infilling", "reports_replaced": True},
        data={"sample_format": sample_format, "seq_length": 64},
    )  # fmt: skip
    full = 0
    for fields in batches(config, tmp_path):
        for row in range(len(fields["input_ids"])):
            ids = fields["input_ids"][row][fields["sequence_ids"][row] > 0]
            labels, inputs = fields["decoder_labels"][row], fields["decoder_input_ids"][row]
            size = int((labels != IGNORE_LABEL).sum())
            assert ids[0] == labels[0] == TOKENIZER.cls_id and ids[-1] == labels[size - 1] == TOKENIZER.sep_id
            assert inputs[0] == TOKENIZER.sep_id and inputs[1:size].tolist() == labels[: size - 1].tolist()
            full += size == 64
            reported = fields["replaced_labels"][row]
            kept = labels[:size][reported[:size] == IGNORE_LABEL]
            assert set(kept.tolist()) <= set(ids.tolist()) and (reported[size:] == IGNORE_LABEL).all()
            lacking = reported != IGNORE_LABEL
            assert (reported[lacking] == labels[lacking]).all() and lacking.any()
    assert full or sample_format != "chunks"


@pytest.mark.parametrize("reports", [False, True])
def test_restored_tokens_are_those_of_spans_if_they_are_reported(reports: bool, tmp_path: Path) -> None:
    config = config_of(objective={"reports_replaced": reports})
    objective = build_objective(config.objective, TOKENIZER)  # type: ignore[arg-type]
    assert isinstance(objective, TextInfilling)
    for fields in batches(config, tmp_path):
        restored, labels = objective.restored(fields), fields["decoder_labels"]
        text = ~np.isin(labels, [IGNORE_LABEL, TOKENIZER.cls_id, TOKENIZER.sep_id])
        assert (restored == (fields["replaced_labels"] != IGNORE_LABEL if reports else text)).all()


def test_without_the_report_there_is_one_term() -> None:
    plain, reporting = (
        build_objective(config_of(objective={"reports_replaced": reports}).objective) for reports in (False, True)
    )
    assert [term.name for term in plain.terms] == ["text_infilling"]
    assert [(term.name, term.weight) for term in reporting.terms] == [("text_infilling", 1.0), ("replaced", 0.0)]
    assert plain.word_labels == {"decoder_logits": "decoder_labels"}


def test_inserted_tokens_have_room() -> None:
    config = config_of(objective={"insert_ratio": 0.25}, data={"seq_length": 100})
    assert config.objective.sample_length(config.data) == 80
    fields = {field.name: field.columns for field in build_objective(config.objective).fields(config.data)}
    assert fields["input_ids"] == 100 and fields["decoder_labels"] == 80


def test_a_sentence_cut_at_the_end_of_a_row_has_room_for_the_separator_after_it() -> None:
    for separated, most in ((True, 63), (False, 64)):
        config = config_of(data={"separate_sentences": separated, "seq_length": 64})
        assert config.objective.sample_length(config.data) == most


def multilingual(folder: Path, **data: object) -> RunConfig:
    train = []
    for seed, language in enumerate(LANGUAGES):
        prefix = write_dataset(folder / language, documents(30, seed))
        train.append({"path": str(prefix), "language": language, "name": language})
    return config_of(
        objective={"language_tokens": True, "sentence_end": None},
        data={"separate_sentences": True, "train": train, "blend": "temperature", "split": "80,20", **data},
    )


def test_languages_without_blanks_are_those_that_the_tokenizer_has() -> None:
    section = config_of(objective={"language_tokens": True, "token_languages": ["yy_XX", "ja_XX"]}).objective
    assert build_objective(section, TOKENIZER)._rules.token_languages.tolist() == [901]  # type: ignore[arg-type, attr-defined]


def test_the_language_is_that_of_the_source(tmp_path: Path) -> None:
    """`text </s> en_XX` in, `en_XX text </s>` to the decoder, also of held-out rows."""
    config = multilingual(tmp_path)
    objective = build_objective(config.objective, TOKENIZER)  # type: ignore[arg-type]
    rows = build_run_rows(config.row_settings, TOKENIZER, objective)  # type: ignore[arg-type]
    found = set()
    loaded = [*next(iter(TrainLoader(rows.train, objective, config.data, config.training))).micro_batches]
    of = {
        name: list(EvalLoader(source, objective, config.data, config.training, config.evaluation))
        for name, source in rows.validation.items()
    }
    for name, held_out in [("", loaded), *of.items()]:
        for batch in held_out:
            fields = {field: value.numpy() for field, value in batch.fields.items()}
            for row in np.flatnonzero(fields["sequence_ids"][:, 0]):
                ids = fields["input_ids"][row][fields["sequence_ids"][row] > 0]
                labels, inputs = fields["decoder_labels"][row], fields["decoder_input_ids"][row]
                size = int((labels != IGNORE_LABEL).sum())
                assert ids[-1] == inputs[0] == labels[size - 1]
                assert labels[size - 2] == TOKENIZER.sep_id != labels[size - 3]
                assert inputs[1:size].tolist() == labels[: size - 1].tolist()
                assert not {TOKENIZER.cls_id} & {*ids.tolist(), *labels.tolist()}
                found.add(int(ids[-1]))
                assert not name or ids[-1] == LANGUAGES[name]
    assert found == set(LANGUAGES.values())


def test_an_excerpt_has_the_language_of_the_recipe(tmp_path: Path) -> None:
    config = multilingual(tmp_path, split=None)
    objective = build_objective(config.objective, TOKENIZER)  # type: ignore[arg-type]
    with excerpt(config.data.train[1].path, TOKENIZER, config.row_settings, objective, 3) as (rows, _):  # type: ignore[arg-type]
        assert set(rows.samples(np.arange(3), np.zeros(3, dtype=np.int64))[0].language_ids) == {901}
    other = str(write_dataset(tmp_path / "other", documents(30, 5)))
    with (
        excerpt(other, TOKENIZER, config.row_settings, objective, 3) as (rows, _),  # type: ignore[arg-type]
        pytest.raises(ConfigError, match=r"names no language; write data.train as \[\{path: PREFIX, language: en_XX"),
    ):
        next(iter(EvalLoader(rows, objective, config.data, config.training, config.evaluation)))


def test_an_unknown_language_is_refused(tmp_path: Path) -> None:
    config = multilingual(tmp_path)
    source = config.data.train[0].model_copy(update={"language": "zz_ZZ"})
    changed = config.model_copy(update={"data": config.data.model_copy(update={"train": [source]})})
    objective = build_objective(config.objective, TOKENIZER)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no special token zz_ZZ, which a source names as its language"):
        build_run_rows(changed.row_settings, TOKENIZER, objective)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"objective": {"mask_ratio": 0.0, "permute_ratio": 0.0}}, "objective.mask_ratio: 0, as are permute_ratio"),
        ({"data": {"seq_length": 4}, "objective": {"insert_ratio": 1.0}}, "data.seq_length: 4 leaves no room"),
        ({"data": {"packing": True}}, "so texts cannot share rows; set it to false"),
        (
            {"objective": {"sentence_end": None}},
            "objective.sentence_end: null, the separator, but data.separate_sentences is false",
        ),
        (
            {"objective": {"language_tokens": True}, "data": {"train": ["d"]}},
            "data.train[0].language: missing: objective.name text_infilling writes the token of each source's language "
            "(en_XX) if objective.language_tokens is true; name it, or set that to false",
        ),
        (
            {"data": {"train": [{"path": "d", "language": "xx_XX"}]}},
            "data.train[0].language: xx_XX has no effect with objective.name text_infilling unless it has "
            "objective.language_tokens: true; leave it out",
        ),
    ],
)
def test_impossible_settings_are_refused(sections: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_config(config_of(**sections), None)
    assert words in str(raised.value)


@pytest.mark.parametrize("sections", [
    {"objective": {"sentence_end": None, "permute_ratio": 0.0}},
    {"objective": {"sentence_end": None}, "data": {"separate_sentences": True}},
    {"objective": {"span_lambda": 0.1}},
])  # fmt: skip
def test_possible_settings_are_accepted(sections: dict[str, dict[str, object]]) -> None:
    check_config(config_of(**sections), None)


def test_spans_have_a_shortest_mean() -> None:
    """Lengths are drawn until one is above 0."""
    with pytest.raises(ValidationError, match="greater than or equal to 0.1"):
        config_of(objective={"span_lambda": 0.09})


def test_a_vocabulary_without_the_end_of_sentences_is_refused() -> None:
    section = config_of(objective={"sentence_end": "。"}).objective
    with pytest.raises(ConfigError, match="objective.sentence_end: the tokenizer has no token 。"):
        build_objective(section, TOKENIZER)  # type: ignore[arg-type]
    section = config_of(objective={"sentence_end": "。", "permute_ratio": 0.0}).objective
    build_objective(section, TOKENIZER)  # type: ignore[arg-type]
