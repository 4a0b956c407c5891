"""Unified language modelling on rows of a dataset: the mixture, its fields, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.sample import NO_LABEL
from ctxlm_ds.data.stream.blend import PlannedRows
from ctxlm_ds.data.stream.collate import collate_arrays, split_fields
from ctxlm_ds.data.stream.loader import TRAIN_MASKS, BatchBuilder
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.check import check_config
from tests.ragged import KEY
from tests.sample_data import FakeTokenizer, build_sample_index, random_documents, run_config, write_dataset
from tests.sections import changed_config, objective_section
from tests.unit.data.index.test_index import BERT, config_of

ROWS = 3000
PUBLISHED = {0: 1 / 3, 2: 1 / 6, 3: 1 / 6, 4: 1 / 3}
"""Share of each kind by its first token type."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> RowSource:
    prefix = write_dataset(tmp_path_factory.mktemp("unified") / "d", random_documents(500, sentences=16, tokens=6))
    return RowSource([build_sample_index(prefix, BERT, config_of("segment_pair", random_next_prob=1 / 6))])


def test_static_masks_keep_the_kind_of_a_sequence(tmp_path: Path) -> None:
    config = run_config(data={"sample_format": "segment_pair"}, objective={"name": "unified_lm", "masking": "static"})
    rows = build_rows([write_dataset(tmp_path / "d", random_documents(60, sentences=8))], BERT, config.row_settings)
    objective = build_objective(config.objective, BERT)
    objective.read_corpus(rows, 7)
    builder, numbers = BatchBuilder(rows, objective, config.data, 7, TRAIN_MASKS), np.arange(len(rows))
    first, later = (builder.examples(PlannedRows(numbers, np.full_like(numbers, epoch)))[0] for epoch in (0, 3))
    assert np.array_equal(first.types, later.types) and np.array_equal(first.ranks, later.ranks)
    assert np.array_equal(first.examples.input_ids, later.examples.input_ids) and len(set(first.types.tolist())) > 3


def test_the_mixture_of_a_dataset(rows: RowSource) -> None:
    objective = build_objective(objective_section(name="unified_lm"), FakeTokenizer())
    objective.read_corpus(rows, 7)
    epochs = range(1 + ROWS // len(rows))
    found, labels = [], []
    for epoch in epochs:
        samples, row_starts = rows.samples(np.arange(len(rows)), np.full(len(rows), epoch))
        examples = objective.corrupt_batch(samples, KEY, np.full(len(samples.keys), 20))
        fields = objective.fields(config_of("segment_pair").data)
        arrays = split_fields(collate_arrays(objective, fields, examples, row_starts), fields)
        kinds = arrays["token_type_ids"][:, 0]
        found.append(kinds)
        labels.append(arrays["next_sentence_labels"][:, 0])
        assert ((labels[-1] == IGNORE_LABEL) == (kinds != 0)).all()
        assert (samples.sequence_labels[kinds == 4] == 0).all()
        inside = arrays["sequence_ids"] > 0
        assert (arrays["ranks"][~inside] == 0).all()
        last = inside.sum(axis=1) - 1
        for kind, first_rank, last_rank in ((0, 0 * last, 0 * last), (2, 0 * last, last), (3, last, 0 * last)):
            chosen = kinds == kind
            assert (arrays["ranks"][chosen, 0] == first_rank[chosen]).all()
            assert (arrays["ranks"][np.arange(len(last)), last][chosen] == last_rank[chosen]).all()
    kinds, count = np.concatenate(found), sum(map(len, found))
    for kind, share in PUBLISHED.items():
        assert abs((kinds == kind).mean() - share) < 4 * np.sqrt(share * (1 - share) / count), kind
    judged = np.concatenate(labels)[kinds == 0]
    assert abs(judged.mean() - 0.5) < 4 * np.sqrt(0.25 / len(judged)) + 0.02
    for number in range(len(found[-1])):
        example = examples.example(number)
        assert example.token_type_ids[0] == found[-1][number]
        assert example.sequence_label == (NO_LABEL if labels[-1][number] == IGNORE_LABEL else labels[-1][number])


def test_too_few_pairs_that_follow_each_other_are_refused(rows: RowSource) -> None:
    objective = build_objective(objective_section(name="unified_lm", sequence_to_sequence_prob=0.9), FakeTokenizer())
    with pytest.raises(ConfigError, match=r"sequence_to_sequence_prob 0\.9: only 0\.\d+ of the pairs .*lower it"):
        objective.read_corpus(rows, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective.left_to_right_prob": 0.6}, "objective.sequence_to_sequence_prob: .* more than 1"),
        ({"model.type_vocab_size": 2}, "model.type_vocab_size: 2: .* have 6 token types"),
        ({"model.family": "bert"}, "objective.name: unified_lm needs the model outputs ranked_logits"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, object], message: str) -> None:
    sections = {"model": {"family": "unilm"}, "objective": {"name": "unified_lm"}}
    with pytest.raises(ConfigError, match=message):
        check_config(changed_config(sections, changes), None)
    check_config(changed_config(sections, {}), None)


def test_a_preview_names_the_kind(rows: RowSource) -> None:
    objective = build_objective(objective_section(name="unified_lm"), FakeTokenizer())
    objective.read_corpus(rows, 7)
    samples, _ = rows.samples(np.arange(50), np.zeros(50, dtype=np.int64))
    examples = objective.corrupt_batch(samples, KEY, np.full(50, 20))
    shown = {objective.render(examples.example(number), FakeTokenizer()).plain.split(":")[0] for number in range(50)}
    assert shown >= {"left-to-right", "right-to-left", "sequence-to-sequence"}
